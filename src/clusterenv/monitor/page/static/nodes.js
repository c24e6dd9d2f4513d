// The header and the table of nodes.
"use strict";
(() => {
  const monitor = window.monitor;
  const { el, setText, known, count, bytes, share, duration } = monitor;
  const byId = (id) => document.getElementById(id);
  const MEAN_S = 30;

  const STATES = { rollout: "collecting", stream: "collecting", evaluate: "collecting", step: "stepping" };

  const UNCONNECTED = { connecting: "connecting", lost: "connection lost", stale: "no new data" };

  /** What the run does, in a word. */
  function stateOf(sample) {
    if (!sample) return "starting";
    if (sample.is_over) return "over";
    if (!sample.call) return "learner works";
    return STATES[sample.call] || `in ${sample.call}()`;
  }

  /** The mean rate of the last half minute: a single second is 0 whenever the learner works. */
  function recentRate(points) {
    const last = points[points.length - 1];
    if (!last) return null;
    const recent = points.filter((point) => point.time_s > last.time_s - MEAN_S);
    return recent.reduce((sum, point) => sum + point.steps_per_s, 0) / recent.length;
  }

  function renderHeader(store) {
    const { info, sample, points, connection } = store;
    const state = sample?.is_over ? "over" : UNCONNECTED[connection.state] || stateOf(sample);
    const badge = byId("run-state");
    badge.dataset.state = state;
    setText(badge, state);
    if (!info) return;
    setText(byId("run-name"), info.name);
    const isLive = sample && !sample.is_over && connection.state === "live";
    const since = sample && sample.call_s >= 1 ? ` for ${duration(sample.call_s)}` : "";
    setText(byId("run-call"), isLive && sample.call ? `${sample.call}()${since}` : isLive ? since.trim() : "");
    const policy = sample?.policy?.runtime ? `policy: ${sample.policy.family} in ${sample.policy.runtime}` : "";
    const facts = [`${info.env} × ${info.num_envs}`, info.backend, `${info.host}, process ${info.pid}`,
      `since ${monitor.date(info.began_at)}`, policy, info.command];
    setText(byId("run-facts"), facts.filter(Boolean).join("  ·  "));
    setText(byId("foot"), `clusterenv ${info.version}`);
    const rate = recentRate(points);
    document.title = `${info.name}: ${sample?.is_over || connection.state === "lost" ? state : `${count(rate)} steps/s`}`;
    renderNumbers(store, rate);
  }

  function renderNumbers({ info, sample }, rate) {
    const point = sample?.point || {};
    const joined = sample ? sample.nodes.filter((node) => node.state === "joined").length : 0;
    const running = sample ? sample.workers.filter((worker) => worker.state === "running").length : 0;
    const entries = [
      [`steps/s, ${MEAN_S} s mean`, count(known(rate) ? Math.round(rate) : null)],
      ["steps", count(point.steps)],
      ["episodes", count(point.episodes)],
      ["return", known(point.episode_return) ? monitor.rounded(point.episode_return) : monitor.DASH],
      ["uptime", known(point.time_s) ? duration(point.time_s - info.began_at) : monitor.DASH],
      ["nodes", sample ? `${joined}` : monitor.DASH, sample ? `of ${sample.nodes.length}` : ""],
      ["workers", sample ? `${running}` : monitor.DASH, sample ? `of ${sample.workers.length}` : ""],
      ["losses", count(point.losses), point.invalid_rows ? `${count(point.invalid_rows)} rows` : ""],
      ["head CPU", share(point.cpu), known(point.memory) ? bytes(point.memory) : ""],
    ];
    byId("numbers").replaceChildren(
      ...entries.map(([name, value, extra]) =>
        el("div", {}, el("dt", {}, name), el("dd", {}, value, extra ? el("small", {}, extra) : null)),
      ),
    );
  }

  function meter(value, text) {
    if (!known(value)) return monitor.DASH;
    const bar = el("i", { class: value > 0.95 ? "full" : null });
    bar.style.width = `${Math.round(Math.min(1, value) * 100)}%`;
    return el("span", { class: "meter" }, el("span", { class: "box", "aria-hidden": "true" }, bar), text);
  }

  /** The bytes of this run; the rate, which is that of the whole machine, is shown when one points at them. */
  function traffic(total, rate) {
    return known(rate) ? el("span", { title: `the machine's network: ${bytes(rate)}/s` }, bytes(total)) : bytes(total);
  }

  function row(node, workers) {
    const own = workers.filter((worker) => worker.node === node.node);
    const running = own.filter((worker) => worker.state === "running").length;
    const host = node.host;
    const silent = node.state === "joined" && node.silent_s > 5 ? `silent for ${duration(node.silent_s)}` : "";
    const reason = [node.scheduler, silent].filter(Boolean).join(", ");
    const state = el("span", {}, el("span", { class: "badge", "data-state": node.state }, node.state), reason ? ` ${reason}` : null);
    const throttled = host && host.throttled > 0.01 ? el("span", { class: "warn" }, ` throttled ${share(host.throttled)}`) : null;
    const swaps = host && host.swap_bytes_per_s > 1e5 ? el("span", { class: "warn" }, ` swaps ${bytes(host.swap_bytes_per_s)}/s`) : null;
    const isShort = known(node.time_left_s) && node.time_left_s < 900;
    return [
      String(node.node),
      state,
      node.host_name || monitor.DASH,
      node.job || monitor.DASH,
      [known(node.time_left_s) ? duration(node.time_left_s) + (isShort ? " !" : "") : monitor.DASH, isShort ? "n warn" : "n"],
      host ? el("span", {}, meter(host.cpu, `${share(host.cpu)} of ${host.cores}`), throttled) : monitor.DASH,
      host && host.memory_total
        ? el("span", {}, meter(host.memory_used / host.memory_total, `${bytes(host.memory_used)} of ${bytes(host.memory_total)}`), swaps)
        : monitor.DASH,
      [traffic(node.sent_bytes, host?.received_bytes_per_s), "n"],
      [traffic(node.received_bytes, host?.sent_bytes_per_s), "n"],
      [running < own.length ? el("span", { class: "warn" }, `${running} of ${own.length}`) : `${running}`, "n"],
    ];
  }

  function renderNodes({ sample }) {
    const nodes = sample?.nodes || [];
    monitor.fillTable(document.querySelector("#nodes table"), nodes.map((node) => row(node, sample.workers)));
    return nodes.length > 0;
  }

  monitor.renderHeader = renderHeader;
  monitor.sections.push({ id: "nodes", render: renderNodes });
})();
