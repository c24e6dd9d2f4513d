// Steps per second, time shares, returns and lengths over time.
"use strict";
(() => {
  const monitor = window.monitor;
  const { count, known, rounded, share } = monitor;
  const at = (id) => document.getElementById(id);
  const whole = (value) => count(Math.abs(value) >= 100 ? Math.round(value) : Number(value.toPrecision(3))).replace(/\.0+(?=\D)/, "");

  const steps = monitor.chart(at("rates-steps"), {
    label: "Steps per second", height: 225, min: 0, format: whole,
    lines: [
      { name: "each second", get: (p) => p.steps_per_s, style: "environment", faint: true },
      { name: "mean of 30 s", get: (p) => p.steps_per_s, style: "environment", mean: 30 },
    ],
  });
  const part = (name) => ({ name, style: name, get: (p) => p[name], mean: 30 });
  const shares = monitor.chart(at("rates-shares"), {
    label: "Shares of the workers' time", height: 195, min: 0, max: 1, format: share,
    areas: [part("environment"), part("policy"), { ...part("waiting"), hatched: true }],
  });
  const returns = monitor.chart(at("returns-return"), {
    label: "Mean return", height: 165, format: whole,
    lines: [{ name: "return", get: (p) => p.episode_return, style: "environment" }],
  });
  const lengths = monitor.chart(at("returns-length"), {
    label: "Mean length of episodes", height: 145, min: 0, format: whole,
    lines: [{ name: "steps", get: (p) => p.episode_length, style: "second" }],
  });

  monitor.sections.push({
    id: "rates",
    render({ points, range }) {
      steps.update(points, range);
      shares.update(points, range);
      const hasShares = points.some((point) => known(point.environment));
      at("rates-shares").hidden = !hasShares;
      at("rates-shares").previousElementSibling.hidden = !hasShares;
      return points.some((point) => point.steps > 0);
    },
  });
  monitor.sections.push({
    id: "returns",
    render({ points, range }) {
      returns.update(points, range);
      lengths.update(points, range);
      return points.some((point) => known(point.episode_return));
    },
  });
  monitor.whole = whole;
  monitor.small = (value) => rounded(value, 2);
})();
