# SPDX-License-Identifier: Apache-2.0
"""The documentation builds without a warning or a network, and holds what the code has."""

from __future__ import annotations

import argparse
import html
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import site_links

import precast
from precast import errors
from precast._base import env as _env
from precast._base import public_name
from precast._op.dispatch import kernels
from precast._ops.moe._backends import CUTE_DSL
from precast._plan import keys
from precast._plan.installed import plan
from precast.cli import _main

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PACKAGE = Path(precast.__file__).parent

#: Put first on the path of the build: a process that opens a connection fails.
NO_NETWORK = """
import socket

def reject(self, address, *rest):
    if self.family != socket.AF_UNIX:
        raise OSError(f"the build of the documentation connects to {address}")

socket.socket.connect = socket.socket.connect_ex = reject
"""


#: Of the pictures, one of so many is drawn; at night all of them.
EVERYTHING = bool(os.environ.get("TEST_ALL"))
PICTURES = 1 if EVERYTHING else 8


def offline_python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run Python at the root of the checkout, without settings and without a network."""
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECAST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT / "python")])
    environment["NO_MKDOCS_2_WARNING"] = "1"
    environment["DOCS_PICTURES"] = f"1/{PICTURES}"
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` builds it; a warning is an error."""
    folder = tmp_path_factory.mktemp("docs")
    target = str(folder / "site")
    done = offline_python(folder, "-m", "mkdocs", "build", "--strict", "-d", target)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f'{output}\nNo mkdocs? Fix: pip install ".[docs]"'
    assert "WARNING" not in output, output
    return folder / "site"


@pytest.fixture
def sitegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generators of the pages can be imported."""
    monkeypatch.syspath_prepend(str(DOCS))


def shown(site: Path, page: str) -> str:
    """The text of a page's article, without its source code and markup."""
    text = (site / page).read_text(encoding="utf-8")
    text = text[text.index("<article") : text.index("</article>")]
    text = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", text))


# -- the whole site -------------------------------------------------------------------------------


def test_links_and_anchors_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    assert list(site_links.problems(site)) == []


def test_a_build_that_connects_to_something_fails(tmp_path):
    code = "import socket; socket.create_connection(('127.0.0.1', 9))"
    assert "the build of the documentation connects" in offline_python(tmp_path, "-c", code).stderr


def test_the_checker_sees_every_kind_of_problem(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"></a><a href="b.html#there"></a><a href="c.html"></a>'
        '<a href="#none"></a><a href="https://example.org/x"></a><a href="https:/x"></a>'
        '<script src="https://cdn.example.org/x.js"></script><img src="no.png">'
        '<link rel="stylesheet" href="https://fonts.example.org/x.css">'
    )
    assert list(site_links.problems(tmp_path)) == [
        "a.html: 'b.html#there' has no such anchor",
        "a.html: 'c.html' does not exist",
        "a.html: '#none' has no such anchor",
        "a.html: 'https:/x' is malformed",
        "a.html: 'https://cdn.example.org/x.js' is loaded from elsewhere",
        "a.html: 'no.png' does not exist",
        "a.html: 'https://fonts.example.org/x.css' is loaded from elsewhere",
    ]


def test_style_sheets_load_nothing_from_elsewhere(site):
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text()) == [], path
    # The theme's script would fetch mermaid for such a block.
    assert [p for p in site.rglob("*.html") if 'class="mermaid"' in p.read_text()] == []


def test_only_pages_and_their_pictures_are_published(site):
    assert [p for p in site.rglob("*") if p.suffix in (".py", ".pyc", ".yml")] == []
    assert not (site / "drawings").exists()


def test_the_search_of_a_site_on_a_disk_has_its_index_and_its_worker(site):
    """A page from a disk can neither fetch the index nor start a worker."""
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert script == f"var __index = {index}"
    # It has what explains a function, and not its source code, which is on the page.
    text = (site / "reference" / "ops" / "scale.html").read_text(encoding="utf-8")
    source = re.search(r"Source code in <code>\S+/scale\.py</code>.*?</details>", text, re.DOTALL)
    assert source is not None
    assert "    factor: float,\n" in html.unescape(re.sub(r"<[^>]*>", "", source[0]))
    assert "<p>The multiplier, rounded to float32.</p>" in index
    assert "Source code in" not in index
    assert "source listing" not in text
    for path, page in site_links.read(site).items():
        scripts = [link for link in page.loads if link.endswith(".js")]
        names = [re.sub(r"\..*", "", link.rpartition("/")[2]) for link in scripts]
        assert names == ["iframe-worker", "bundle"], path
    bundle = next((site / "assets" / "javascripts").glob("bundle.*.js")).read_text(encoding="utf-8")
    assert "search/search_index.js" in bundle


def test_the_performance_page_shows_its_pictures(site, sitegen):
    from sitegen import pictures

    text = (site / "performance.html").read_text(encoding="utf-8")
    shown = re.findall(r'<img alt="(\w+): [^"]+" src="(img/[^"]+\.svg)"', text)
    assert len(shown) > 40
    assert "generated: pictures" not in text
    texts = {path: (run, (site / path).read_text(encoding="utf-8")) for run, path in shown}
    drawn = [(run, text) for run, text in texts.values() if text != pictures.BLANK]
    assert len(drawn) >= (len(texts) if EVERYTHING else 1)
    for run, text in drawn:
        assert f">{run}: NVIDIA" in text
    assert {path for _, path in shown} == {f"img/{p.name}" for p in (site / "img").iterdir()}


def test_every_page_is_in_the_navigation(site):
    linked = {link.partition("#")[0] for link in site_links.read(site)[site / "index.html"].links}
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert pages - {"404.html", "index.html"} <= linked
    assert {f"{path.stem}.html" for path in DOCS.glob("*.md")} <= pages


def test_docstrings_leave_no_restructured_text(site):
    for path in (site / "reference").rglob("*.html"):
        text = shown(site, path.relative_to(site).as_posix())
        assert re.findall(r":\w+:`|\.\. \w+::|::$", text, re.MULTILINE) == [], path


def test_files_of_the_repository_are_shown_whole(site):
    for source, page in (("CONTRIBUTING.md", "contributing"), ("CHANGELOG.md", "changelog")):
        text = re.sub(r"^```.*?^```", "", (ROOT / source).read_text(), flags=re.M | re.S)
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        page_text = shown(site, f"{page}.html")
        assert headings
        assert [h for h in headings if h.replace("`", "") not in page_text] == []
    assert "file=" not in shown(site, "contributing.html")


# -- the table of ops -----------------------------------------------------------------------------


def test_the_table_of_ops_is_made_from_the_exports(sitegen):
    import ops_table

    page = (ROOT / ops_table.PAGE).read_text(encoding="utf-8")
    assert page == ops_table.made(page), "Fix: make generate"
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", ops_table.table(), re.MULTILINE))
    assert rows["norm_quant"].endswith("| f16, bf16; `dtype_out` e4m3, e5m2")
    # Modules of the wrappers of ``attention`` and ``mla``, and what is in ``precast.comm`` alone.
    without = {"attention_plan", "attention_nvfp4", "attention_sm90", "attention_sm90_fp8"}
    without |= {
        "fp8_gemm_gated_sm90",
        "fp8_gemm_sm90",
        "gemm_gated_sm90",
        "gemm_sm90",
        "int4_gemm_sm90",
        "mxfp4_gemm_sm90",
        "scaled_gemm_sm90",
        "mla_sm90",
    }
    without |= {"allreduce_fusion", "custom_all_reduce"}
    # The second kernels of functions that have one in CUDA.
    without |= {name for name in rows.keys() | plan().config.ops.keys() if name.endswith(CUTE_DSL)}
    assert rows.keys() >= {kernel.op for kernel in kernels().values()} - without
    for name in (kernel.function for kernel in kernels().values()):
        assert not hasattr(precast, name) or any(f"`{name}`" in row for row in rows.values()), name


def test_a_page_without_the_block_is_rejected(sitegen):
    import ops_table

    with pytest.raises(ValueError, match="one block between ops:begin and ops:end"):
        ops_table.made("# precast\n")


# -- the reference --------------------------------------------------------------------------------


def test_every_public_name_has_an_entry(site, sitegen):
    from sitegen import ops, public

    pages = site_links.read(site)
    anchors = set().union(*(p.anchors for path, p in pages.items() if "reference" in path.parts))
    exported = {name.name: name for name in public.exported()}
    assert {"scale", "rmsnorm", "preload", "reference_mode"} <= exported.keys()
    for name in exported.values():
        assert name.path in anchors
        if name.reference is not None:
            assert name.reference in anchors
    for op in plan().config.ops.values():
        for export in op.exports:
            name = kernels()[export].function
            if not hasattr(precast, name):
                assert f"precast.comm.{name}" in anchors
                continue
            function = getattr(precast, name)
            is_called = kernels()[export].traced or inspect.isclass(function)
            if name not in kernels() and not is_called:
                continue  # A step of a function, which is on the page of its public module.
            # A function with kernels of two ops is on the page of the one that has its name; the
            # kernels of a class stand on its page, whatever modules they are of.
            home = kernels()[name].op if name in kernels() else op.name
            family = ops.wrappers().get(exported[name].module.__name__.rpartition(".")[2], home)
            page = pages[site / "reference" / "ops" / f"{family}.html"]
            assert any(anchor.endswith(f".{function.__name__}") for anchor in page.anchors), export
    for module in ops.library():
        for name in module.__all__:
            found = f"{module.__name__}.{name}" in anchors
            assert found or hasattr(precast, name) or hasattr(errors, name), (module, name)


def test_what_functions_of_a_package_have_in_common_is_on_its_page(site):
    pages = site_links.read(site)
    page = site / "reference" / "ops" / "sampling.html"
    text = re.sub(r"\s+", " ", shown(site, "reference/ops/sampling.html"))
    assert "Equal seeds give equal tokens." in text
    assert "the likeliest that hold top_p of the mass together" in text
    assert "precast.sampling" in pages[page].anchors
    functions = [k.function for k in kernels().values() if k.op == "sampling"]
    assert pages[page].links.count("#precast.sampling") >= len(functions)
    fused = pages[site / "reference" / "ops" / "sampling_fused.html"]
    assert "sampling.html#precast.sampling" in fused.links


def test_names_are_shown_under_the_path_that_users_import(sitegen):
    from sitegen.public import exported

    paths = {name.name: name.path for name in exported()}
    assert paths["rmsnorm"] == "precast.norm.rmsnorm"
    assert paths["scale"] == "precast.scale"
    assert [path for path in paths.values() if "._" in path] == []


def test_raised_errors_link_to_the_page_of_errors(site):
    links = site_links.read(site)[site / "reference" / "runtime.html"].links
    assert "../errors.html#precast.errors.MissingKernelError" in links


def test_wrappers_show_methods_of_their_bases(site):
    anchors = site_links.read(site)[site / "reference" / "ops" / "attention.html"].anchors
    wrapper = "precast.decode.BatchDecodeWithPagedKVCacheWrapper"
    for method in ("plan", "run", "workspace_size", "reset_workspace_buffer"):
        assert f"{wrapper}.{method}" in anchors


def test_formulas_are_mathml(site):
    text = (site / "reference/ops/scale.html").read_text()
    assert re.search(r"<math [^>]*display=\"block\".*<mtext>round</mtext>.*</math>", text)


def test_a_new_op_gets_into_the_page_of_its_family(sitegen, monkeypatch):
    from sitegen import ops

    def gemma_layernorm() -> None: ...

    def gemma_layernorm_reference() -> None: ...

    home, exports = "precast._ops.norm.layernorm", dict(public_name.exports())
    for function in (gemma_layernorm, gemma_layernorm_reference):
        function.__module__, function.__qualname__ = home, function.__name__
        exports[home, function.__name__] = "precast.norm"
        for name in ("precast.norm", home):
            module = importlib.import_module(name)
            monkeypatch.setattr(module, function.__name__, function, raising=False)
    monkeypatch.setattr(public_name, "exports", lambda: exports)
    monkeypatch.setattr(precast, "__all__", [*precast.__all__, "gemma_layernorm"])
    monkeypatch.setattr(precast, "gemma_layernorm", gemma_layernorm, raising=False)
    page = ops.pages()["reference/ops/norm.md"]
    assert "::: precast.norm.gemma_layernorm\n" in page
    assert "::: precast.norm.gemma_layernorm_reference\n" in page


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("See :func:`scale` and :class:`~a.b.Thing`.", "See <code>scale</code> and"),
        (".. math:: a \\\n    + b\n\nmore", "```math\na \\\n+ b\n```\n\nmore"),
        (
            "=== =====\n0   one\n    more\n10  two words\n=== =====\n\nmore",
            "|  |  |\n| --- | --- |\n| 0 | one more |\n| 10 | two words |\n\nmore",
        ),
        ("As in::\n\n    x = 1\n\nmore", "As in:\n\n```text\nx = 1\n```\n\nmore"),
    ],
)
def test_restructured_text_becomes_markdown(sitegen, text, want):
    from sitegen import rst

    assert want in rst.markdown(text)


# -- configuration --------------------------------------------------------------------------------


def test_every_variable_and_key_is_on_the_page(site):
    text, anchors = shown(site, "configuration.html"), site_links.read(site)
    for row in _env.REGISTRY:
        assert row.name in text
        assert row.name in anchors[site / "configuration.html"].anchors
    for title, table in keys.TABLES.items():
        assert title in text
        for key, meaning in table.items():
            assert re.search(rf"^{key}$\s*{re.escape(meaning.split('`')[0])}", text, re.M), key


def test_a_new_variable_appears(sitegen, monkeypatch):
    from sitegen import settings

    monkeypatch.setattr(_env, "REGISTRY", [*_env.REGISTRY])
    _env.EnvVar("PRECAST_NEW", 7, _env._positive_int, "How many; more than MAX_JOBS is too many.")
    _env.EnvVar("PRECAST_OTHER", "", _env._text, "Where (default: the home (of the user)).")
    assert (
        '| <span id="PRECAST_NEW">`PRECAST_NEW`</span> | `7` | '
        "How many; more than `MAX_JOBS` is too many. |\n"
        '| <span id="PRECAST_OTHER">`PRECAST_OTHER`</span> | the home (of the user) | Where. |\n'
    ) in settings.environment()


def test_the_planner_accepts_the_documented_keys_and_no_others(tree):
    from precast._plan.config import load_config

    scale = tree / "aot_configs" / "scale.toml"
    scale.write_text(f"colour = 'red'\n{scale.read_text()}")
    with pytest.raises(errors.ConfigError, match=f"unknown key; legal: {', '.join(keys.OP)}"):
        load_config(tree)


# -- the command line -----------------------------------------------------------------------------


def _parsers(parser: argparse.ArgumentParser, name: str):
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                yield from _parsers(sub, f"{name} {word}")


def test_every_command_option_and_exit_code_is_on_the_page(site):
    text = shown(site, "cli.html")
    commands = dict(_parsers(_main.build_parser(), "precast"))
    assert len(commands) > 8
    for name, parser in commands.items():
        if name == "precast":
            continue
        assert f"\n{name}" in text
        section = text[text.index(f"\n{name}¶") :]
        for action in parser._actions:
            if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
                for option in action.option_strings:
                    assert option in section, f"{name} {option}"
    assert "--dry-run" in text[text.index("\nprecast build¶") : text.index("\nprecast bundle¶")]
    for code in (_main.OK, _main.FAILED, _main.USAGE, _main.UNABLE, _main.INTERRUPTED):
        assert re.search(rf"^{code}$", text, re.MULTILINE)


def test_arguments_say_whether_they_are_required_and_what_they_take(sitegen):
    from sitegen import commands

    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="a folder")
    parser.add_argument("--source", choices=["a", "b"], help="%(prog)s takes one | the other")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.prog = "tool"
    table = commands._arguments(parser)
    assert "| `-o, --output DIR` | **required**; a folder |" in table
    assert r"| `--source {a,b}` | tool takes one \| the other |" in table
    assert "words" not in table


# -- errors ---------------------------------------------------------------------------------------

KINDS = [
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
]


def test_the_errors_are_found():
    assert {"MissingKernelError", "CacheLayoutError"} <= set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_every_error_is_described_with_its_fix_and_its_real_message(site, sitegen, name):
    from sitegen import raised

    text = shown(site, "errors.html")
    section = re.split(r"¶\n", text[text.index(f"\n{name}¶") :], maxsplit=1)[1]
    section = re.split(r"^.*¶$", section, maxsplit=1, flags=re.MULTILINE)[0]
    assert "Fix:" in section
    source = "".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "errors.py")
    if re.search(rf"(?:raise |\b){name}\(", source):
        first = raised.message(name).splitlines()[0]
        assert f"{name}: {first}" in section
        assert "/tmp" not in section


# -- links of included files ----------------------------------------------------------------------


def test_links_to_the_repository_become_links_to_pages_or_plain_text(sitegen):
    from sitegen.links import rewritten

    text = (
        "[a](CHANGELOG.md#x) [b](docs/decisions.md) [`c`](examples/mlp_block.py) "
        "[d](benchmarks) [e](nothing.md) [f](https://example.org) ![g](docs/img.png)\n"
        "```\n[h](CHANGELOG.md)\n```\n"
    )
    assert rewritten(text, "contributing.md") == (
        "[a](changelog.md#x) [b](decisions.md) `c` "
        "d (`benchmarks`) [e](nothing.md) [f](https://example.org) ![g](docs/img.png)\n"
        "```\n[h](CHANGELOG.md)\n```\n"
    )
    assert rewritten("[x](../README.md) [y](cli.md)", "decisions.md") == "[x](index.md) [y](cli.md)"
