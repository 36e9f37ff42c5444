// SPDX-License-Identifier: Apache-2.0
// Search for pages that are read from a disk. A browser starts no worker from a file, so the
// script of the worker runs in a hidden frame, with the messages of a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.inside = new Promise((ready) => {
        const start = () => {
          const { contentDocument: page, contentWindow: inside } = frame;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = page.createElement("script");
          script.src = new URL(url, location.href);
          script.addEventListener("load", () => ready(inside));
          page.head.append(script);
        };
        // Some browsers replace the document of a new frame once more, before this event.
        frame.addEventListener("load", start, { once: true });
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
