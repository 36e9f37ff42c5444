# SPDX-License-Identifier: Apache-2.0
"""Docstrings are completed from what another one says."""

from __future__ import annotations

import inspect

from precast._op.docs import completed, documented


def turn(x: int, by: int, enable_pdl: bool | None = None) -> int:
    """Turn a number.

    Parameters
    ----------
    x, y : int
        A number
        of two lines.
    by : int
        How far.

    Returns
    -------
    int
        The turned number.

    Raises
    ------
    ValueError
        Never.
    """
    return x + by


def in_place(y: int, by: int, enable_pdl: bool | None = None) -> None:
    """Turn it in place.

    Parameters
    ----------
    by : int
        How far back.

    Notes
    -----
    None.
    """


def test_missing_arguments_come_from_the_sources_in_the_order_of_the_signature():
    assert completed(in_place, turn) == inspect.cleandoc(
        """
        Turn it in place.

        Parameters
        ----------
        y : int
            A number
            of two lines.
        by : int
            How far back.
        enable_pdl : bool, optional
            Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

        Raises
        ------
        ValueError
            Never.

        Notes
        -----
        None.
        """
    )


def test_a_missing_return_value_comes_from_the_first_source_that_has_one():
    @documented("Returns\n-------\nint\n    A text.\n", turn)
    def again(x: int) -> int:
        """Again."""
        return x

    assert "Returns\n-------\nint\n    A text." in again.__doc__
    assert "The turned number" not in again.__doc__
    assert "A number\n    of two lines." in again.__doc__


def test_a_return_value_comes_from_functions_of_the_same_type_alone():
    def several(x: int) -> tuple[int, int]:
        """Several."""
        return x, x

    assert "Returns" not in completed(several, turn)


def test_what_is_raised_and_noted_comes_from_the_first_source_but_not_for_a_reference():
    def again(x: int, by: int) -> int:
        """Again."""
        return x

    text = "Notes\n-----\nOf a text."
    assert completed(again, text, turn).endswith(
        f"Raises\n------\nValueError\n    Never.\n\n{text}"
    )
    again.__name__ = "again_reference"
    assert "Raises" not in completed(again, text, turn)
    assert "Notes" not in completed(again, text, turn)


def test_a_complete_docstring_stays_as_it_is():
    def whole(x: int) -> None:
        """Whole.

        Notes
        -----
        Before.

        Parameters
        ----------
        x : int
            Its own.
        """

    assert completed(whole, in_place) == inspect.getdoc(whole)


def test_python_without_docstrings_has_none():
    def bare(x: int) -> int:
        return x

    assert completed(bare, turn) is None
