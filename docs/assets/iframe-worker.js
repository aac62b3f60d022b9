// Search runs in a worker. Browsers start no worker for a page that was opened from a file, so there a hidden frame
// runs the same script and trades the same messages. Pages from a server keep the browser's own workers.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve) => (this.frame.onload = resolve));
      // The script posts to itself what a worker would post to its page.
      window.addEventListener("message", (this.listener = (event) => {
        if (event.source === this.frame.contentWindow && this.onmessage) this.onmessage(event);
      }));
      this.frame.srcdoc = `<script>window.postMessage = (data) => parent.postMessage(data, "*")<\/script>
        <script src="${new URL(url, location.href)}"><\/script>`;
      document.body.appendChild(this.frame);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.onmessage({ data }));
    }
    terminate() {
      window.removeEventListener("message", this.listener);
      this.frame.remove();
    }
  };
}
