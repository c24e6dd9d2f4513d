// Charts over time, as SVG: lines, bands, stacked areas, a threshold, marks. `monitor.chart(element, options)`.
"use strict";
(() => {
  const monitor = window.monitor;
  const { svg, el, known, clock } = monitor;
  const LEFT = 44;
  const RIGHT = 8;
  const TOP = 6;
  const BOTTOM = 18;

  /**
   * The points to draw: of those that share about a pixel, the lowest and the highest, so that peaks of a long history
   * stay visible. null: a gap.
   */
  function extremes(points, get, from, to, width) {
    const size = (to - from) / Math.max(1, width);
    const found = [];
    let bucket = null;
    const flush = () => {
      if (!bucket) return;
      const { low, high } = bucket;
      if (low === high) found.push(low);
      else found.push(...(low.time_s < high.time_s ? [low, high] : [high, low]));
      bucket = null;
    };
    for (const point of points) {
      const index = Math.floor((point.time_s - from) / size);
      if (!known(get(point))) {
        flush();
        if (found.length && found[found.length - 1]) found.push(null);
        continue;
      }
      if (!bucket || bucket.index !== index) {
        flush();
        bucket = { index, low: point, high: point };
      }
      if (get(point) < get(bucket.low)) bucket.low = point;
      if (get(point) > get(bucket.high)) bucket.high = point;
    }
    flush();
    return found;
  }

  /** The mean of the last `span` seconds at each point. */
  function smoothed(points, get, span) {
    const means = new Map();
    let first = 0;
    let sum = 0;
    let number = 0;
    points.forEach((point, index) => {
      if (known(get(point))) {
        sum += get(point);
        number += 1;
      }
      while (points[first].time_s <= point.time_s - span && first < index) {
        if (known(get(points[first]))) {
          sum -= get(points[first]);
          number -= 1;
        }
        first += 1;
      }
      means.set(point, number ? sum / number : null);
    });
    return (point) => means.get(point);
  }

  function niceStep(span, steps) {
    const raw = span / steps;
    const power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= raw * 0.999);
  }

  function timeStep(span, steps) {
    const choices = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400];
    return choices.find((step) => span / step <= steps) || 86_400 * Math.ceil(span / steps / 86_400);
  }

  function path(points, get, x, y, isStep) {
    let text = "";
    let isGap = true;
    for (const point of points) {
      if (point) {
        const [px, py] = [x(point.time_s).toFixed(1), y(get(point)).toFixed(1)];
        if (isGap) text += `M${px} ${py}`;
        else text += isStep ? `H${px}V${py}` : `L${px} ${py}`;
      }
      isGap = !point;
    }
    return text;
  }

  /** Between two curves over the same points. */
  function area(points, low, high, x, y) {
    const place = (get) => (point) => `${x(point.time_s).toFixed(1)} ${y(get(point)).toFixed(1)}`;
    const [forth, back] = [points.map(place(high)), [...points].reverse().map(place(low))];
    return forth.length ? `M${forth.join("L")}L${back.join("L")}Z` : "";
  }

  /**
   * Draw into `element`; the result's `update(points, seconds)` draws again. Options:
   *   label: what a screen reader says; height; min, max: fixed ends of the axis; format: of values
   *   lines: [{name, get, style, dashed, step, faint, band, mean}] - `mean` seconds are averaged, `band` is ± that;
   *     without a style, only the legend has it
   *   areas: [{name, get, style, hatched, mean}] - stacked
   *   marks: points -> times; markName
   */
  monitor.chart = (element, options) => {
    const drawing = svg("svg", { role: "img", tabindex: 0 });
    const legend = el("ul", { class: "legend" });
    element.append(legend, drawing);
    let shown = { points: [], from: 0, to: 1 };
    let cursor = null;
    const parts = [...(options.areas || []), ...(options.lines || [])];
    const items = parts.filter((part) => !part.faint).map((part) => ({ part, ...legendItem(part) }));
    if (options.markName) legend.append(el("li", {}, el("b", {}, "▼ "), options.markName));
    const when = el("li", { class: "when" });
    legend.append(...items.map((item) => item.item), when);

    function legendItem(part) {
      const swatch = options.areas?.includes(part)
        ? [
            svg("rect", { width: 16, height: 9, class: `c-${part.style}` }),
            part.hatched ? svg("rect", { width: 16, height: 9, fill: "url(#hatch)" }) : null,
          ]
        : [svg("path", { d: "M0 5H16", class: `line c-${part.style}${part.dashed ? " dashed" : ""}` })];
      const value = el("b");
      const sign = part.style ? svg("svg", { "aria-hidden": "true" }, ...swatch) : null;
      return { item: el("li", {}, sign, `${part.name} `, value), value };
    }

    function axis(stacked, values) {
      let low = options.min ?? Math.min(...values);
      let high = options.max ?? Math.max(...values);
      if (!known(low) || !known(high)) [low, high] = [0, 1];
      if (stacked) [low, high] = [0, 1];
      if (high - low < 1e-12) [low, high] = [low - (options.min === undefined ? 0.5 : 0), high + 0.5];
      const step = niceStep(high - low, 4);
      if (options.min === undefined) low = Math.floor(low / step + 1e-9) * step;
      if (options.max === undefined) high = Math.ceil(high / step - 1e-9) * step;
      return { low, high, step };
    }

    function draw() {
      const width = element.clientWidth;
      if (!width) return;
      const height = options.height || 150;
      const { points, from, to } = shown;
      const plot = Math.max(10, width - LEFT - RIGHT);
      const lines = (options.lines || []).map((part) => {
        const get = part.mean ? smoothed(points, part.get, part.mean) : part.get;
        // Single seconds among hundreds are a grey block: only their mean says something then.
        const isDrawn = part.style && !(part.faint && points.length > plot * 0.7);
        return { part, get, drawn: isDrawn ? extremes(points, get, from, to, plot / 2) : [] };
      });
      const values = lines.flatMap(({ part, get, drawn }) =>
        drawn.filter(Boolean).map((point) => get(point) + (part.band?.(point) || 0)));
      const { low, high, step } = axis(Boolean(options.areas), values.length ? values : [0, 1]);
      const x = (time) => LEFT + ((time - from) / (to - from)) * plot;
      const y = (value) => TOP + (1 - (value - low) / (high - low)) * (height - TOP - BOTTOM);
      const made = [];
      for (let value = low; value <= high + step / 1e6; value += step) {
        made.push(svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
        made.push(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, options.format(value)));
      }
      const every = timeStep(to - from, plot / 90);
      const offset = new Date(from * 1000).getTimezoneOffset() * 60;
      for (let time = Math.ceil((from - offset) / every) * every + offset; time <= to; time += every) {
        const place = Math.min(Math.max(x(time), LEFT + 14), width - RIGHT - 16);
        made.push(svg("text", { x: place, y: height - 4, "text-anchor": "middle" }, clock(time, every < 60)));
      }
      const stack = (options.areas || []).map((part) => ({ part, get: part.mean ? smoothed(points, part.get, part.mean) : part.get }));
      made.push(...drawAreas(stack, points, plot, x, y));
      made.push(...lines.flatMap((line) => drawLine(line, x, y)));
      const marks = options.marks ? options.marks(points) : [];
      const isDense = marks.length > plot / 9;
      for (const time of marks.slice(-1000)) {
        const place = x(time).toFixed(1);
        const d = isDense ? `M${place} ${TOP - 5}h1v7h-1z` : `M${place - 3.5} ${TOP - 5}h7l-3.5 6z`;
        made.push(svg("path", { class: "mark c-second", d }));
      }
      if (cursor) made.push(svg("line", { class: "cross", x1: x(cursor.time_s), x2: x(cursor.time_s), y1: TOP, y2: height - BOTTOM }));
      drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
      drawing.setAttribute("height", height);
      drawing.replaceChildren(...made);
      label([...stack, ...lines]);
    }

    function drawLine({ part, get, drawn }, x, y) {
      const made = [];
      if (part.band) {
        const at = (sign) => (point) => get(point) + sign * (part.band(point) || 0);
        made.push(svg("path", { class: `band c-${part.style}`, d: area(drawn.filter(Boolean), at(-1), at(1), x, y) }));
      }
      const name = `line c-${part.style}${part.dashed ? " dashed" : ""}${part.faint ? " faint" : ""}`;
      return [...made, svg("path", { class: name, d: path(drawn, get, x, y, part.step) })];
    }

    function drawAreas(stack, points, plot, x, y) {
      const all = points.filter((point) => stack.every(({ get }) => known(get(point))));
      const stride = Math.max(1, Math.floor(all.length / plot));
      const drawn = all.filter((_, index) => index % stride === 0 || index === all.length - 1);
      let sum = () => 0;
      return stack.flatMap(({ part, get }) => {
        const below = sum;
        sum = (point) => below(point) + get(point);
        const d = area(drawn, below, sum, x, y);
        const hatch = part.hatched ? [svg("path", { fill: "url(#hatch)", d })] : [];
        return [svg("path", { class: `area c-${part.style}`, d }), ...hatch];
      });
    }

    function label(curves) {
      const { points } = shown;
      const at = cursor || points[points.length - 1];
      const texts = items.map(({ part, value }) => {
        const get = curves.find((curve) => curve.part === part).get;
        const number = at ? get(at) : null;
        const band = part.band && at && known(part.band(at)) ? ` ± ${options.format(part.band(at))}` : "";
        const text = known(number) ? `${options.format(number)}${band}` : monitor.DASH;
        monitor.setText(value, text);
        return `${part.name} ${text}`;
      });
      monitor.setText(when, cursor ? clock(cursor.time_s) : "");
      drawing.setAttribute("aria-label", `${options.label}: ${texts.join(", ")}. Arrow keys read earlier values.`);
    }

    function pointAt(clientX) {
      const box = drawing.getBoundingClientRect();
      const plot = box.width - LEFT - RIGHT;
      const time = shown.from + ((clientX - box.left - LEFT) / plot) * (shown.to - shown.from);
      let best = null;
      for (const point of shown.points) {
        if (!best || Math.abs(point.time_s - time) < Math.abs(best.time_s - time)) best = point;
      }
      return best;
    }

    function move(to) {
      cursor = to;
      draw();
    }

    drawing.addEventListener("pointermove", (event) => move(pointAt(event.clientX)));
    drawing.addEventListener("pointerleave", () => move(null));
    drawing.addEventListener("blur", () => move(null));
    drawing.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      const { points } = shown;
      const stride = Math.max(1, Math.round(points.length / 100)) * (event.key === "ArrowLeft" ? -1 : 1);
      const now = cursor ? points.indexOf(cursor) : points.length - 1;
      move(points[Math.min(points.length - 1, Math.max(0, now + stride))] || null);
    });
    new ResizeObserver(draw).observe(element);

    return {
      update(points, seconds) {
        const last = points.length ? points[points.length - 1].time_s : 1;
        const first = points.length ? points[0].time_s : 0;
        const from = seconds ? Math.max(first, last - seconds) : first;
        shown = { points: points.filter((point) => point.time_s >= from), from: Math.min(from, last - 10), to: last };
        if (cursor && !shown.points.includes(cursor)) cursor = null;
        draw();
      },
    };
  };
})();
