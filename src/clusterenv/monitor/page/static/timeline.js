// The fragments of the last minute, a row for each worker. A bar ends when its fragment arrived at the head.
"use strict";
(() => {
  const monitor = window.monitor;
  const { el, svg, share, seconds, colour } = monitor;
  const map = document.getElementById("timeline-map");
  const detail = document.getElementById("timeline-detail");
  const key = document.getElementById("timeline-key");
  const SPAN_S = 60;
  const LABEL = 76;
  const AXIS = 18;
  let view = null;

  function rowsOf(sample, fragments, from) {
    const recent = fragments.filter((fragment) => fragment.arrived_at > from);
    const workers = sample ? sample.workers.map((worker) => worker.worker) : [];
    const nodeOf = new Map(sample ? sample.workers.map((worker) => [worker.worker, worker.node]) : []);
    const known = [...new Set([...workers, ...recent.map((fragment) => fragment.worker)])].sort((a, b) => a - b);
    return { recent, rows: new Map(known.map((worker, index) => [worker, index])), nodeOf };
  }

  function draw() {
    const available = map.parentElement.clientWidth;
    if (!view || !available) return;
    const { recent, rows, nodeOf, from } = view;
    const row = Math.max(6, Math.min(14, Math.floor(440 / Math.max(1, rows.size))));
    const width = Math.max(300, available);
    const height = rows.size * row + AXIS;
    const context = monitor.canvas2d(map, width, height);
    const x = (time) => LABEL + ((time - from) / SPAN_S) * (width - LABEL - 4);
    const bar = row - (row > 8 ? 3 : 1);
    drawAxis(context, x, from, height);
    context.fillStyle = colour("quiet");
    const every = Math.ceil(12 / row);
    let previous;
    for (const [worker, index] of rows) {
      const node = nodeOf.get(worker);
      const isFirst = node !== previous;
      previous = node;
      if (isFirst && index) {
        context.fillStyle = colour("line");
        context.fillRect(0, index * row - 1, width, 1);
        context.fillStyle = colour("quiet");
      }
      if (isFirst && node !== undefined) context.fillText(`node ${node}`, 0, index * row + 9);
      if (index % every === 0) context.fillText(String(worker), 46, index * row + 9);
    }
    const environment = colour("environment");
    const policy = colour("policy");
    view.bars = [];
    for (const fragment of recent) {
      const y = rows.get(fragment.worker) * row + 1;
      const end = x(fragment.arrived_at);
      const middle = Math.max(LABEL, x(fragment.arrived_at - fragment.policy_s));
      const start = Math.max(LABEL, x(fragment.arrived_at - fragment.policy_s - fragment.environment_s));
      context.fillStyle = environment;
      context.fillRect(start, y, Math.max(0, middle - start), bar);
      context.fillStyle = policy;
      // Lower than the environment's part: the two can be told apart without their colours.
      context.fillRect(middle, y + bar * 0.35, Math.max(0, end - middle), bar * 0.65);
      view.bars.push({ x: start, end, y, height: bar, fragment });
    }
  }

  function drawAxis(context, x, from, height) {
    context.font = "11px system-ui, sans-serif";
    for (let back = SPAN_S; back >= 0; back -= 10) {
      const place = Math.round(x(from + SPAN_S - back));
      context.fillStyle = colour("grid");
      context.fillRect(place, 0, 1, height - AXIS);
      context.fillStyle = colour("quiet");
      context.textAlign = back === 0 ? "right" : "center";
      context.fillText(back ? `−${back} s` : "now", place, height - 4);
    }
    context.textAlign = "left";
  }

  function renderKey(recent) {
    const sum = (get) => recent.reduce((total, fragment) => total + get(fragment), 0);
    const steps = sum((fragment) => fragment.num_steps);
    const busy = sum((fragment) => fragment.environment_s + fragment.policy_s);
    const part = (value) => (busy ? ` ${share(value / busy)} of busy time` : "");
    const swatch = (name, y, height) => svg("svg", { "aria-hidden": "true" }, svg("rect", { width: 16, y, height, class: `c-${name}` }));
    key.replaceChildren(
      el("li", {}, swatch("environment", 0, 9), "environment, high bar", el("b", {}, part(sum((fragment) => fragment.environment_s)))),
      el("li", {}, swatch("policy", 3, 6), "policy, low bar", el("b", {}, part(sum((fragment) => fragment.policy_s)))),
      el("li", {}, "gap: waiting"),
      el("li", {}, el("b", {}, monitor.count(recent.length)), " fragments, ", el("b", {}, monitor.count(steps)), " steps"),
    );
  }

  function render({ sample, fragments }) {
    if (!fragments.length) return false;
    const now = Math.max(sample ? sample.point.time_s : 0, fragments[fragments.length - 1].arrived_at);
    view = { ...rowsOf(sample, fragments, now - SPAN_S), from: now - SPAN_S };
    map.hidden = false;
    map.setAttribute("aria-label", `${view.recent.length} fragments of ${view.rows.size} workers in the last minute`);
    renderKey(view.recent);
    draw();
    return true;
  }

  for (const name of ["pointermove", "pointerdown"]) {
    map.addEventListener(name, (event) => {
      const box = map.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const bar = view?.bars?.find((one) => x >= one.x && x <= one.end && y >= one.y - 1 && y <= one.y + one.height + 1);
      if (!bar) return;
      const { fragment } = bar;
      monitor.setText(detail, [
        `worker ${fragment.worker}`,
        `${fragment.num_steps} steps`,
        `environment ${seconds(fragment.environment_s)}`,
        `policy ${seconds(fragment.policy_s)}`,
        `asked ${monitor.clock(fragment.asked_at)}, arrived ${seconds(fragment.arrived_at - fragment.asked_at)} later`,
        fragment.version === null ? "" : `version ${fragment.version}`,
      ].filter(Boolean).join("  ·  "));
    });
  }
  new ResizeObserver(draw).observe(map.parentElement);
  monitor.sections.push({ id: "timeline", render });
})();
