// Numbers, times and elements. Texts reach the page only through `textContent`: they come from environments and nodes.
"use strict";
(() => {
  const monitor = (window.monitor = { sections: [] });
  const SVG = "http://www.w3.org/2000/svg";

  /** Make an element; `attributes` are set as they are, children are nodes or texts. */
  function el(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    return fill(made, attributes, children);
  }

  function svg(tag, attributes = {}, ...children) {
    const made = document.createElementNS(SVG, tag);
    return fill(made, attributes, children);
  }

  function fill(made, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined).map(asNode));
    return made;
  }

  const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));

  /** Set a text only if it changed, so that selections and screen readers are left alone. */
  function setText(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
  const DASH = "–";

  function rounded(value, digits = 3) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1000 || Number.isInteger(value)) return String(Math.round(value));
    return String(Number(value.toPrecision(digits)));
  }

  function scaled(value, base, units) {
    let index = 0;
    let size = Math.abs(value);
    while (size >= base * 0.99995 && index < units.length - 1) {
      size /= base;
      index += 1;
    }
    const digits = index === 0 ? (Number.isInteger(value) ? 0 : size < 10 ? 2 : 1) : size < 10 ? 2 : size < 100 ? 1 : 0;
    return [(Math.sign(value) * size).toFixed(digits), units[index]];
  }

  function count(value) {
    if (!known(value)) return DASH;
    if (Math.abs(value) < 10_000 && Number.isInteger(value)) return String(value);
    return scaled(value, 1000, ["", "k", "M", "G", "T"]).join("");
  }

  function bytes(value) {
    if (!known(value)) return DASH;
    return scaled(Math.round(value), 1000, ["B", "kB", "MB", "GB", "TB"]).join(" ");
  }

  const share = (value) => (known(value) ? `${Math.round(value * 100)} %` : DASH);

  /** A short time: 420 µs, 1.4 ms, 2.1 s. */
  function seconds(value) {
    if (!known(value) || value <= 0) return DASH;
    if (value < 1e-3) return `${rounded(value * 1e6)} µs`;
    if (value < 1) return `${rounded(value * 1e3)} ms`;
    return `${rounded(value)} s`;
  }

  /** A long time: 42 s, 14 min 05 s, 3 h 20 min, 2 d 4 h. */
  function duration(value) {
    if (!known(value)) return DASH;
    const whole = Math.max(0, Math.round(value));
    const two = (number) => String(number).padStart(2, "0");
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
    if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
    return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
  }

  function clock(unix, withSeconds = true) {
    const date = new Date(unix * 1000);
    const parts = [date.getHours(), date.getMinutes(), ...(withSeconds ? [date.getSeconds()] : [])];
    return parts.map((part) => String(part).padStart(2, "0")).join(":");
  }

  function date(unix) {
    const day = new Date(unix * 1000);
    const two = (number) => String(number).padStart(2, "0");
    return `${day.getFullYear()}-${two(day.getMonth() + 1)}-${two(day.getDate())} ${clock(unix)}`;
  }

  /** [0, 1, 2, 5] → "0-2, 5" */
  function spans(numbers) {
    const parts = [];
    for (const number of numbers) {
      const last = parts[parts.length - 1];
      if (last && last[1] === number - 1) last[1] = number;
      else parts.push([number, number]);
    }
    return parts.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`)).join(", ");
  }

  function median(values) {
    const sorted = values.filter((value) => value > 0).sort((a, b) => a - b);
    return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /** Fit a canvas to its size in CSS pixels and return its context, cleared. */
  function canvas2d(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return context;
  }

  /** Replace the rows of a table: `rows` are arrays of nodes, texts or [text, class]; the first is the row's header. */
  function fillTable(table, rows) {
    table.hidden = rows.length === 0;
    table.tBodies[0].replaceChildren(
      ...rows.map((cells) =>
        el("tr", {}, ...cells.map((cell, index) => {
          const [content, name] = Array.isArray(cell) ? cell : [cell, null];
          return index === 0 ? el("th", { scope: "row", class: name }, content) : el("td", { class: name }, content);
        })),
      ),
    );
  }

  Object.assign(monitor, {
    el, svg, setText, known, rounded, count, bytes, share, seconds, duration, clock, date, spans, median, colour,
    canvas2d, fillTable, DASH,
  });
})();
