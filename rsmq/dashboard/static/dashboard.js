"use strict";
// Replaces the parts of a live page that have changed. The server makes the markup, with every text escaped.
function element(markup) {
  const made = document.createElement("template");
  made.innerHTML = markup;
  return made.content.firstElementChild;
}

// Adds the time of this machine beside each time in UTC, where the two differ.
const UTC_TIME = /^(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z| UTC)?(?= |$)/;
function addLocalTimes(root) {
  const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (UTC_TIME.test(node.data) && node.parentElement.closest("td, dd") && !node.parentElement.closest("code, pre, a"))
      found.push(node);
  }
  for (const node of found) {
    const [whole, day, time] = node.data.match(UTC_TIME);
    const at = new Date(`${day}T${time}Z`);
    if (!at.getTimezoneOffset() || isNaN(at)) continue;
    const local = new Date(at - at.getTimezoneOffset() * 60000).toISOString();
    const text = local.startsWith(day) ? local.slice(11, 19) : `${local.slice(0, 10)} ${local.slice(11, 19)}`;
    const local_time = document.createElement("span");
    local_time.className = "local";
    local_time.textContent = ` (${text} here)`;
    const both = document.createElement("span");
    node.replaceWith(both);
    both.append(node, local_time);
    if (node.data.length > whole.length) both.append(node.splitText(whole.length));
  }
}

function begin() {
  const address = new URL(location.href);
  address.searchParams.set("live", "1");
  address.searchParams.delete("note");
  const events = new EventSource(address);
  events.onmessage = (event) => {
    for (const [id, markup] of Object.entries(JSON.parse(event.data))) {
      const old = document.getElementById(id);
      if (old && !old.contains(document.activeElement)) {
        const made = element(markup);
        old.replaceWith(made);
        addLocalTimes(made);
      }
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
addLocalTimes(document.querySelector("main") ?? document.body);
if (document.querySelector("main[data-live]")) begin();
