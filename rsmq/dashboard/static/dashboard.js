"use strict";
// Replaces the parts of a live page that have changed. The server makes the markup, with every text escaped.
function element(markup) {
  const made = document.createElement("template");
  made.innerHTML = markup;
  return made.content.firstElementChild;
}

function begin() {
  const address = new URL(location.href);
  address.searchParams.set("live", "1");
  address.searchParams.delete("note");
  const events = new EventSource(address);
  events.onmessage = (event) => {
    for (const [id, markup] of Object.entries(JSON.parse(event.data))) {
      const old = document.getElementById(id);
      if (old && !old.contains(document.activeElement)) old.replaceWith(element(markup));
    }
    document.body.dataset.connected = "yes";
  };
  events.onerror = () => {
    document.body.dataset.connected = "no";
    const banner = document.getElementById("trouble");
    banner.textContent = "the dashboard does not answer: what you see is old";
    banner.className = "trouble";
  };
  events.onopen = () => {
    const banner = document.getElementById("trouble");
    if (document.body.dataset.connected === "no") banner.className = "none";
  };
}

for (const all of document.querySelectorAll("input[data-all]")) {
  all.addEventListener("change", () => {
    for (const each of all.form.querySelectorAll("input[name=id]")) each.checked = all.checked;
  });
}
if (document.querySelector("main[data-live]")) begin();
