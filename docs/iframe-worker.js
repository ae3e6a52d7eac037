// From disk (file://) browsers refuse workers: the search's script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe"), script = document.createElement("script");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      this.loaded = new Promise(resolve => { script.onload = resolve; });
      script.src = url;
      frame.contentDocument.body.append(script);
    }
    async postMessage(data) {
      await this.loaded;
      this.scope.dispatchEvent(new MessageEvent("message", {data}));
    }
  };
}
