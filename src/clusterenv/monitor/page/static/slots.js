// The heat map of slots: a cell for each environment, grouped by node, with a table of those to look at.
"use strict";
(() => {
  const monitor = window.monitor;
  const { el, known, seconds, share, count, colour } = monitor;
  const map = document.getElementById("slots-map");
  const by = document.getElementById("slots-by");
  const detail = document.getElementById("slots-detail");
  const scale = document.getElementById("slots-scale");
  const LABEL = 16;
  const SHADES = 7;
  let view = null; // cells, and what they show
  let chosen = null;
  let lastStore = null;

  const COLOURINGS = {
    step: { value: (slot) => slot.step_s || null, text: seconds, log: true },
    incarnation: { value: (slot) => slot.incarnation, text: (value) => String(Math.round(value)) },
    rate: { value: (slot) => slot.worker?.steps_per_s ?? null, text: (value) => count(Math.round(value)), log: true },
    waiting: { value: (slot) => slot.worker?.waiting ?? null, text: share },
  };

  function describe(sample) {
    const workerOf = new Map();
    for (const worker of sample.workers) {
      for (let slot = worker.slots[0]; slot <= worker.slots[1]; slot += 1) workerOf.set(slot, worker);
    }
    const slow = new Set(sample.slow);
    return sample.step_s.map((step_s, slot) => ({
      slot, step_s, worker: workerOf.get(slot), incarnation: sample.incarnations[slot] || 0, isSlow: slow.has(slot),
      lastLoss: sample.last_loss[slot],
    }));
  }

  /** Shade of a value, 0 to 6, or null. Between the 2nd and the 98th percentile, so that one slot does not flatten the rest. */
  function shading(slots, colouring) {
    const values = slots.map(colouring.value).filter(known).sort((a, b) => a - b);
    if (!values.length) return { shade: () => null, low: null, high: null };
    const low = values[Math.floor(0.02 * (values.length - 1))];
    const high = values[Math.ceil(0.98 * (values.length - 1))];
    const place = colouring.log ? Math.log : (value) => value;
    const shade = (value) => {
      if (!known(value)) return null;
      if (high <= low) return value > 0 && !colouring.log ? SHADES - 1 : 1;
      const where = (place(value) - place(low)) / (place(high) - place(low));
      return Math.min(SHADES - 1, Math.max(0, Math.floor(where * SHADES)));
    };
    return { shade, low, high };
  }

  function layout(slots, width) {
    const size = slots.length <= 512 ? 17 : slots.length <= 1536 ? 13 : 9;
    const gap = size > 10 ? 2 : 1;
    const groups = new Map();
    for (const slot of slots) {
      const node = slot.worker ? slot.worker.node : -1;
      if (!groups.has(node)) groups.set(node, []);
      groups.get(node).push(slot);
    }
    const cells = [];
    const labels = [];
    let y = 0;
    for (const [node, members] of [...groups].sort((a, b) => a[0] - b[0])) {
      labels.push({ text: node < 0 ? "slots" : `node ${node}`, y: y + 11 });
      y += LABEL;
      let x = 0;
      let worker = members[0].worker;
      for (const slot of members) {
        if (slot.worker !== worker) {
          worker = slot.worker;
          x += size > 10 ? 5 : 2;
          const whole = (worker ? worker.slots[1] - worker.slots[0] + 1 : 1) * (size + gap) - gap;
          if (x + whole > width && whole <= width) [x, y] = [0, y + size + gap];
        }
        if (x + size > width) [x, y] = [0, y + size + gap];
        cells.push({ x, y, slot });
        x += size + gap;
      }
      y += size + 6;
    }
    return { cells, labels, size, height: Math.max(1, y) };
  }

  function draw() {
    if (!view || !map.parentElement.clientWidth) return;
    const width = map.parentElement.clientWidth - 28;
    const { slots, colouring } = view;
    const { cells, labels, size, height } = (view.layout = layout(slots, width));
    const { shade, low, high } = shading(slots, colouring);
    const shades = Array.from({ length: SHADES }, (_, index) => colour(`heat-${index}`));
    const inks = [colour("heat-ink-low"), colour("heat-ink-high")];
    const context = monitor.canvas2d(map, width, height);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("quiet");
    labels.forEach((label) => context.fillText(label.text, 0, label.y));
    for (const { x, y, slot } of cells) {
      const index = shade(colouring.value(slot));
      if (index === null) {
        context.strokeStyle = colour("line");
        context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      } else {
        context.fillStyle = shades[index];
        context.fillRect(x, y, size, size);
      }
      drawMarks(context, slot, x, y, size, inks[index !== null && index > 3 ? 1 : 0]);
      if (slot.slot === chosen) {
        context.strokeStyle = colour("text");
        context.lineWidth = 2;
        context.strokeRect(x, y, size, size);
        context.lineWidth = 1;
      }
    }
    drawScale(shades, low, high, colouring);
  }

  function drawMarks(context, slot, x, y, size, ink) {
    context.fillStyle = ink;
    if (size < 13) {
      // No room for signs: a dot means that the slot is in the table below.
      if (slot.isSlow || slot.incarnation || slot.lastLoss) context.fillRect(x + size / 2 - 1.5, y + size / 2 - 1.5, 3, 3);
      return;
    }
    context.textAlign = "center";
    context.textBaseline = "middle";
    const half = size / 2;
    if (slot.isSlow) {
      context.beginPath();
      context.moveTo(x + size - 8, y + 7);
      context.lineTo(x + size - 1, y + 7);
      context.lineTo(x + size - 4.5, y + 1);
      context.fill();
    }
    if (slot.incarnation) {
      context.font = `600 ${size > 15 ? 10 : 9}px system-ui, sans-serif`;
      context.fillText(slot.incarnation > 9 ? "+" : String(slot.incarnation), x + half + 3, y + half + (slot.isSlow ? 3 : 1));
    }
    if (slot.lastLoss !== undefined) {
      context.font = `600 ${size > 15 ? 11 : 9}px system-ui, sans-serif`;
      context.fillText("×", x + half - 4, y + half + 1);
    }
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
  }

  function drawScale(shades, low, high, colouring) {
    const steps = shades.map((shade) => {
      const step = el("i");
      step.style.background = shade;
      return step;
    });
    const ends = known(low) ? [colouring.text(low), colouring.text(high)] : ["", "not measured yet"];
    scale.replaceChildren(el("span", {}, ends[0]), el("span", { "aria-hidden": "true" }, ...steps), el("span", {}, ends[1]));
  }

  function sentence(slot, middle) {
    const worker = slot.worker;
    const times = slot.step_s && middle ? ` (${monitor.rounded(slot.step_s / middle, 2)} × median)` : "";
    const parts = [
      `slot ${slot.slot}`,
      worker ? `worker ${worker.worker} on node ${worker.node}, ${worker.state}` : "",
      `incarnation ${slot.incarnation}`,
      slot.step_s ? `${seconds(slot.step_s)} per step${times}` : "step time not measured",
      slot.isSlow ? "much slower than the others" : "",
      worker && worker.stuck_s > 1 ? `no progress for ${seconds(worker.stuck_s)} in ${worker.phase || "a request"}` : "",
      slot.lastLoss === undefined ? "no loss" : `last loss: ${slot.lastLoss}`,
    ];
    return parts.filter(Boolean).join("  ·  ");
  }

  function choose(slot) {
    chosen = slot;
    const found = view?.slots[slot];
    if (found) monitor.setText(detail, sentence(found, view.middle));
    draw();
  }

  function renderTable(slots, middle) {
    const notable = slots.filter((slot) => slot.isSlow || slot.lastLoss !== undefined || slot.incarnation);
    notable.sort((a, b) => b.incarnation - a.incarnation || b.step_s - a.step_s);
    monitor.fillTable(document.getElementById("slots-table"), notable.slice(0, 6).map((slot) => [
      [String(slot.slot), "n"], [String(slot.worker?.worker ?? monitor.DASH), "n"], [String(slot.worker?.node ?? monitor.DASH), "n"],
      [String(slot.incarnation), "n"], [seconds(slot.step_s), "n"],
      [slot.step_s && middle ? monitor.rounded(slot.step_s / middle, 2) + (slot.isSlow ? " ▲" : "") : monitor.DASH, "n"],
      [slot.lastLoss ?? "none", "cut"],
    ]));
  }

  function render(store) {
    lastStore = store;
    const { sample } = store;
    if (!sample || !sample.step_s.length) return false;
    const slots = describe(sample);
    const middle = monitor.median(sample.step_s);
    view = { slots, middle, colouring: COLOURINGS[by.value] };
    map.hidden = false;
    const lost = slots.filter((slot) => slot.lastLoss !== undefined).length;
    map.setAttribute("aria-label", `${slots.length} slots, median ${seconds(middle)} per step, ${sample.slow.length} slow, ` +
      `${lost} with losses. Arrow keys move from slot to slot.`);
    renderTable(slots, middle);
    if (chosen !== null && slots[chosen]) monitor.setText(detail, sentence(slots[chosen], middle));
    draw();
    return true;
  }

  function slotAt(event) {
    if (!view?.layout) return null;
    const box = map.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const { cells, size } = view.layout;
    const cell = cells.find((one) => x >= one.x - 1 && x <= one.x + size + 1 && y >= one.y - 1 && y <= one.y + size + 1);
    return cell ? cell.slot.slot : null;
  }

  for (const name of ["pointermove", "pointerdown"]) {
    map.addEventListener(name, (event) => {
      const slot = slotAt(event);
      if (slot !== null && slot !== chosen) choose(slot);
    });
  }
  map.addEventListener("keydown", (event) => {
    const perRow = view?.layout?.cells.filter((cell) => cell.y === view.layout.cells[0].y).length || 1;
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -perRow, ArrowDown: perRow }[event.key];
    if (!move || !view) return;
    event.preventDefault();
    choose(Math.min(view.slots.length - 1, Math.max(0, (chosen ?? -1) + move)));
  });
  by.addEventListener("change", () => lastStore && render(lastStore));
  new ResizeObserver(draw).observe(map.parentElement);
  monitor.sections.push({ id: "slots", render });
})();
