// The list of events, newest first, with tracebacks to expand and a filter by kind.
"use strict";
(() => {
  const monitor = window.monitor;
  const { el } = monitor;
  const list = document.getElementById("events-list");
  const filter = document.getElementById("events-kind");
  const MOST = 300;
  const BAD = new Set(["env_error", "env_lost", "worker_lost", "node_lost", "weights_damaged", "dropped"]);
  let shownUpTo = -1;
  let lastStore = null;

  function where(event) {
    const parts = [];
    if (event.slots.length) parts.push(`${event.slots.length === 1 ? "slot" : "slots"} ${monitor.spans(event.slots)}`);
    if (event.worker !== null) parts.push(`worker ${event.worker}`);
    for (const name of ["phase", "incarnation", "seed", "step"]) {
      if (event[name] !== null) parts.push(`${name} ${event[name]}`);
    }
    return parts.join(", ");
  }

  function item(event) {
    const line = [
      el("time", { datetime: new Date(event.time_s * 1000).toISOString() }, monitor.clock(event.time_s)),
      el("span", { class: BAD.has(event.kind) ? "kind bad" : "kind" }, event.kind),
      el("span", {}, event.reason),
      el("span", { class: "where" }, ` ${where(event)}`),
    ];
    if (!event.detail) return el("li", { class: "plain" }, ...line);
    return el("li", {}, el("details", {}, el("summary", {}, ...line), el("pre", { tabindex: 0 }, event.detail)));
  }

  function renderKinds(counts) {
    const kinds = Object.entries(counts).sort();
    for (const [kind, number] of kinds) {
      let option = [...filter.options].find((one) => one.value === kind);
      if (!option) filter.append((option = el("option", { value: kind })));
      monitor.setText(option, `${kind} (${number})`);
    }
  }

  /** Add only what is new: rebuilding the list would close the tracebacks that someone reads. */
  function render(store) {
    lastStore = store;
    const { events, sample } = store;
    const counts = sample?.event_counts || {};
    const added = events.filter((event) => event.number > shownUpTo && (!filter.value || event.kind === filter.value));
    if (events.length) shownUpTo = Math.max(shownUpTo, events[events.length - 1].number);
    if (added.length) {
      list.prepend(...added.slice(-MOST).reverse().map(item));
      while (list.children.length > MOST) list.lastElementChild.remove();
    }
    renderKinds(counts);
    const total = Object.values(counts).reduce((sum, number) => sum + number, 0);
    monitor.setText(document.getElementById("events-count"), `${list.children.length} shown of ${Math.max(total, events.length)}`);
    return events.length > 0;
  }

  filter.addEventListener("change", () => {
    list.replaceChildren();
    shownUpTo = -1;
    if (lastStore) render(lastStore);
  });
  monitor.sections.push({ id: "events", render });
})();
