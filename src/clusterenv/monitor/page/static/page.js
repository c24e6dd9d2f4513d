// What the page knows of the run, from the stream of a live one or the data in a report; draws the sections anew.
"use strict";
(() => {
  const monitor = window.monitor;
  const MOST_POINTS = 6000;
  const MOST_EVENTS = 1000;
  const FRAGMENTS_S = 65;
  const STALE_S = 8;
  const RETRY_S = 5;

  const store = {
    info: null, sample: null, points: [], events: [], fragments: [],
    range: 0, // seconds that charts show; 0: all
    connection: { state: "connecting", since: Date.now(), text: "" },
  };
  let receivedAt = 0;
  let source = null;
  let isPlanned = false;
  let rendersFailed = false;

  /** Add what is new; what is here already (after a new connection) is left out. */
  function merge(update) {
    const later = (list, added, get) => {
      const last = list.length ? get(list[list.length - 1]) : -Infinity;
      return list.concat(added.filter((one) => get(one) > last));
    };
    store.info = update.info;
    store.sample = update.sample || store.sample;
    store.points = thinned(later(store.points, update.points, (point) => point.time_s));
    store.events = later(store.events, update.events, (event) => event.number).slice(-MOST_EVENTS);
    store.fragments = later(store.fragments, update.fragments, (fragment) => fragment.arrived_at);
    const newest = store.fragments.length ? store.fragments[store.fragments.length - 1].arrived_at : 0;
    store.fragments = store.fragments.filter((fragment) => fragment.arrived_at > newest - FRAGMENTS_S);
  }

  /** A page that is open for days keeps every second point of its older half, with the mean rate of the two. */
  function thinned(points) {
    if (points.length <= MOST_POINTS) return points;
    const half = MOST_POINTS / 2;
    const kept = [];
    for (let i = 1; i < half; i += 2) {
      kept.push({ ...points[i], steps_per_s: (points[i - 1].steps_per_s + points[i].steps_per_s) / 2 });
    }
    return kept.concat(points.slice(half));
  }

  function notice() {
    const { connection, sample } = store;
    const box = document.getElementById("notice");
    const at = monitor.clock(connection.since / 1000);
    let [kind, text] = ["", ""];
    if (connection.state === "report") {
      const end = sample ? ` The data ends at ${monitor.date(sample.point.time_s)}.` : "";
      text = `This is a report, not a live page.${end}${sample && !sample.is_over ? " The run was not over then." : ""}`;
    } else if (sample?.is_over) {
      text = "The run is over. This page keeps what it has received; `clusterenv report` writes it to a file.";
    } else if (connection.state === "lost") {
      [kind, text] = ["bad", `Connection lost at ${at}. What is shown is from then; trying again. ${connection.text}`];
    } else if (connection.state === "stale") {
      [kind, text] = ["warn", `No new data since ${at}: the run's process is stopped, or too busy to sample.`];
    }
    box.hidden = !text;
    box.dataset.kind = kind;
    monitor.setText(box, text);
  }

  function render() {
    isPlanned = false;
    notice();
    monitor.renderHeader(store);
    for (const { id, render: renderSection } of monitor.sections) {
      try {
        document.getElementById(id).classList.toggle("filled", Boolean(renderSection(store)));
      } catch (error) {
        // One section that cannot be drawn must not hide the others.
        if (!rendersFailed) console.error(`section ${id}:`, error);
        rendersFailed = true;
      }
    }
    document.documentElement.dataset.rendered = String(store.sample ? store.sample.point.time_s : 0);
  }

  function plan() {
    if (isPlanned || document.hidden) return;
    isPlanned = true;
    requestAnimationFrame(render);
  }

  function connect() {
    source = new EventSource("stream");
    source.onmessage = (message) => {
      merge(JSON.parse(message.data));
      receivedAt = Date.now();
      set("live");
      if (store.sample?.is_over) source.close();
    };
    source.addEventListener("unreachable", (message) => set("lost", JSON.parse(message.data).text));
    source.onerror = () => {
      set("lost", store.connection.text);
      // The browser connects again by itself, but not after an answer that is an error.
      if (source.readyState === EventSource.CLOSED && !store.sample?.is_over) setTimeout(connect, RETRY_S * 1000);
    };
  }

  function set(state, text = "") {
    if (state !== store.connection.state) store.connection = { state, text, since: Date.now() };
    plan();
  }

  function start() {
    const data = document.getElementById("data");
    if (data) {
      merge(JSON.parse(data.textContent));
      store.connection = { state: "report", since: Date.now(), text: "" };
      render();
    } else {
      connect();
      setInterval(() => {
        const isStale = receivedAt && Date.now() - receivedAt > STALE_S * 1000;
        if (store.connection.state === "live" && isStale && !store.sample?.is_over) {
          store.connection = { state: "stale", since: receivedAt, text: "" };
          plan();
        }
      }, 1000);
    }
    document.addEventListener("visibilitychange", plan);
    document.getElementById("range").addEventListener("change", (event) => {
      store.range = Number(event.target.value);
      plan();
    });
    // Canvases have the colours of the scheme that they were drawn in.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", plan);
  }

  start();
})();
