// Synchronization of the weights: drift against its threshold, versions, bytes, codecs, lags.
"use strict";
(() => {
  const monitor = window.monitor;
  const { el, known, bytes, count } = monitor;
  const at = (id) => document.getElementById(id);
  const MOST_LAGS = 12;

  const drift = monitor.chart(at("sync-drift"), {
    label: "Drift", height: 250, min: 0, format: (value) => monitor.small(value), markName: "pull",
    lines: [
      { name: "drift", get: (p) => p.drift, band: (p) => p.drift_se, style: "environment" },
      { name: "threshold", get: (p) => p.threshold, style: "bad", dashed: true },
    ],
    marks: (points) => points.filter((p, i) => i && p.pulls > points[i - 1].pulls).map((p) => p.time_s),
  });
  const versions = monitor.chart(at("sync-versions"), {
    label: "Versions of the weights", height: 250, min: 0, format: (value) => count(Math.round(value)),
    lines: [
      { name: "newest", get: (p) => p.version },
      { name: "held", get: (p) => p.held_version },
      { name: "behind", get: (p) => (known(p.version) && known(p.held_version) ? p.version - p.held_version : null),
        style: "second", step: true },
    ],
  });

  function bar(value, most, name) {
    const inner = el("i", { class: name });
    inner.style.width = `${most ? (100 * value) / most : 0}%`;
    return el("span", { class: "box", "aria-hidden": "true" }, inner);
  }

  function renderBytes(point) {
    const most = Math.max(point.pushed_bytes, point.weight_bytes);
    const saved = point.pushed_bytes && point.weight_bytes
      ? `${monitor.rounded((100 * point.weight_bytes) / point.pushed_bytes, 2)} % of what Always sends whole`
      : "nothing sent yet";
    at("sync-bytes").replaceChildren(
      el("span", { class: "sum" }, saved),
      el("span", {}, `sent ${bytes(point.weight_bytes)}`), bar(point.weight_bytes, most),
      el("span", {}, `Always ${bytes(point.pushed_bytes)}`), bar(point.pushed_bytes, most, "would"),
    );
  }

  /** Sum dicts of counts over the nodes. */
  function total(nodes, name) {
    const sums = new Map();
    for (const node of nodes) {
      for (const [key, number] of Object.entries(node[name] || {})) sums.set(key, (sums.get(key) || 0) + number);
    }
    return sums;
  }

  function renderCounts(id, entries) {
    const most = Math.max(...entries.map((entry) => entry[1]), 1);
    monitor.fillTable(at(id), entries.map(([name, number]) => {
      const inner = el("i", { "aria-hidden": "true" });
      inner.style.width = `${(100 * number) / most}%`;
      return [name, [count(number), "n"], [inner, "track"]];
    }));
  }

  function lagEntries(nodes) {
    const lags = [...total(nodes, "lags")].map(([lag, number]) => [Number(lag), number]).sort((a, b) => a[0] - b[0]);
    const shown = lags.slice(0, MOST_LAGS - 1).map(([lag, number]) => [String(lag), number]);
    const rest = lags.slice(MOST_LAGS - 1);
    if (rest.length) shown.push([`${rest[0][0]} or more`, rest.reduce((sum, entry) => sum + entry[1], 0)]);
    return shown;
  }

  function renderNodes(nodes, newest) {
    const rows = nodes.filter((node) => known(node.version)).map((node) => [
      `${node.node}${node.host_name ? ` ${node.host_name}` : ""}`,
      [String(node.version), "n"],
      [known(newest) ? String(newest - node.version) : monitor.DASH, "n"],
      [[node.drift, node.drift_se].filter(known).map(monitor.small).join(" ± ") || monitor.DASH, "n"],
      [count(node.pulls), "n"],
      [bytes(node.weight_bytes), "n"],
      Object.entries(node.forms).map(([codec, number]) => `${codec} ${number}`).join(", "),
    ]);
    monitor.fillTable(at("sync-nodes"), rows);
  }

  monitor.sections.push({
    id: "sync",
    render({ sample, points, range }) {
      drift.update(points, range);
      versions.update(points, range);
      if (!sample || !known(sample.point.version)) return false;
      renderBytes(sample.point);
      renderCounts("sync-forms", [...total(sample.nodes, "forms")].sort((a, b) => b[1] - a[1]));
      renderCounts("sync-lags", lagEntries(sample.nodes));
      renderNodes(sample.nodes, sample.point.version);
      return true;
    },
  });
})();
