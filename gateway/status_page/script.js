"use strict";

// The live status page: asks the admin API every second and draws what it says. No library, no build step.
// Text goes in as text, never as markup: names of tenants and models come from outside.

const CLASSES = ["P0", "P1", "P2"];
const WORDS = { P0: "realtime", P1: "normal", P2: "batch" };
const REFRESH_MS = 1000;
const PATIENCE_MS = 5000;
const STALE_MS = 4000;
const SPAN_SECONDS_MAX = 300;
const SPAN_SECONDS_MIN = 60;
const SPARK_POINTS = 60;
const SLOW_EVERY = 3; // tables of single requests and tenants come every third time

const VERDICTS = {
  kept: "✓ kept",
  at_risk: "! at risk",
  broken: "✗ broken",
  no_traffic: "no traffic",
  no_promise: "no promise",
};
const REASONS = {
  wait: "first tokens come late",
  gap: "gaps between tokens are long",
  kv: "the engines' KV memory is nearly full",
  demand: "the engines bear more, and requests wait for tokens",
  recovery: "the engines are well again",
  settings: "settings were changed",
  capacity: "an engine went or came",
  p0_below_promise: "P0 is below its promise",
  p1_below_promise: "P1 is below its promise",
  p0_held_back: "P0 needs more than its rate",
  p0_does_not_use_its_rate: "P0 does not use its rate",
};
const OUTCOMES = {
  completed: "completed",
  rejected_rate: "refused: no tokens in time",
  rejected_queue_full: "refused: queue full",
  queue_timeout: "refused: waited too long",
  rejected_no_upstream: "refused: no engine up",
  rejected_draining: "refused: draining",
  unauthorized: "key missing or unknown",
  forbidden: "not allowed",
  not_found: "no such model or path",
  bad_request: "bad request",
  too_large: "too large",
  upstream_refused: "engine: no usable answer",
  upstream_timeout: "engine: too slow",
  upstream_error: "engine: error",
  upstream_aborted: "engine: stream broke off",
  client_gone_queued: "client left while waiting",
  client_gone_streaming: "client left mid-answer",
  client_stalled: "client stopped reading",
  internal_error: "gateway: internal error",
};

const samples = [];
let lastNumber = 0;
let lastAnswerAt = null;
let turns = 0;
let spoken = "";
let timer = null;
let lastUptime = 0;
let trouble = null;
let busy = false;
let severalPools = false;

// ── elements ─────────────────────────────────────────────────────────────────────────────────────────────

const find = (id) => document.getElementById(id);

function element(name, className, ...content) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...content.filter((each) => each !== null && each !== undefined));
  return made;
}

function drawn(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const quiet = (text) => element("span", "quiet", text);

// ── figures in words ─────────────────────────────────────────────────────────────────────────────────────

const whole = (value) => Math.round(value).toLocaleString("en");

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toFixed(size >= 1e7 ? 0 : 1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(size >= 1e5 ? 0 : 1) + "k";
  return whole(value);
}

function percent(ratio) {
  if (ratio === null || ratio === undefined) return "–";
  if (ratio === 1) return "100 %";
  return (Math.floor(ratio * 1000) / 10).toFixed(1) + " %"; // never rounded up to a promise that is not kept
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return "<1 ms";
  if (value < 0.9995) return Math.round(value * 1000) + " ms";
  return (value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : whole(value)) + " s";
}

function ago(value) {
  if (value < 1) return "now";
  if (value < 90) return Math.round(value) + " s ago";
  if (value < 5400) return Math.round(value / 60) + " min ago";
  return Math.round(value / 3600) + " h ago";
}

function lasting(value) {
  if (value < 120) return Math.floor(value) + " s";
  if (value < 7200) return Math.floor(value / 60) + " min";
  if (value < 172800) return Math.floor(value / 3600) + " h";
  return Math.floor(value / 86400) + " d";
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const last = () => samples[samples.length - 1];

// ── sparklines ───────────────────────────────────────────────────────────────────────────────────────────

// What charts show: all that is known, up to five minutes.
const span = () => (samples.length ? Math.min(Math.max(samples[0].seconds_ago, SPAN_SECONDS_MIN), SPAN_SECONDS_MAX) : SPAN_SECONDS_MIN);
const spanWords = () => (span() < 100 ? `last ${Math.round(span())} s` : `last ${Math.round(span() / 60)} min`);

// Points are [seconds ago, value or null]; the box is as wide as the span, time runs to the right.
function linePath(points, low, high, height) {
  let path = "";
  let open = false;
  const width = span();
  const y = (value) => (height - ((value - low) / (high - low || 1)) * height).toFixed(1);
  for (const [back, value] of points) {
    if (value === null) {
      open = false;
      continue;
    }
    path += (open ? "L" : "M") + (width - back).toFixed(1) + " " + y(value);
    open = true;
  }
  return path;
}

// Means of equal parts of the time: a small chart of 300 points is noise.
function thinned(points, most) {
  const size = Math.ceil(points.length / most);
  if (size < 2) return points;
  const parts = [];
  for (let end = points.length; end > 0; end -= size) {
    const part = points.slice(Math.max(end - size, 0), end);
    const known = part.map(([, value]) => value).filter((value) => value !== null);
    parts.unshift([part[part.length - 1][0], known.length ? sum(known) / known.length : null]);
  }
  return parts;
}

function spark(all, { low = 0, high, mark = null, label }) {
  const height = 40;
  const width = span();
  const points = thinned(all, SPARK_POINTS);
  const svg = drawn("svg", {
    class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${label}, ${spanWords()}`,
  });
  const known = points.filter(([, value]) => value !== null);
  if (high === undefined) high = Math.max(1, ...known.map(([, value]) => value), mark ?? 0) * 1.05;
  const clipped = points.map(([back, value]) => [back, value === null ? null : Math.min(Math.max(value, low), high)]);
  const line = linePath(clipped, low, high, height);
  const unbroken = known.length === points.length && known.length > 1;
  if (unbroken) {
    const first = width - points[0][0];
    const end = width - points[points.length - 1][0];
    svg.append(drawn("path", { class: "fill", d: `${line}L${end} ${height}L${first} ${height}Z` }));
  }
  if (mark !== null) {
    const y = height - ((mark - low) / (high - low)) * height;
    svg.append(drawn("line", { class: "mark", x1: 0, x2: width, y1: y, y2: y }));
  }
  svg.append(drawn("path", { class: "line", d: line }));
  return svg;
}

const series = (of) => samples.map((sample) => [sample.seconds_ago, of(sample)]);

// Requests a second, from two running totals ten seconds apart.
function pace(totals, index) {
  if (samples.length < 2) return 0;
  const now = last();
  const then = samples[Math.max(samples.length - 11, 0)];
  return (now[totals][index] - then[totals][index]) / (then.seconds_ago - now.seconds_ago);
}

// ── the whole ────────────────────────────────────────────────────────────────────────────────────────────

function totals(state) {
  const pools = state.pools;
  const of = (name) => {
    const each = pools.map((pool) => pool.classes[name]);
    const add = (field) => sum(each.map((figures) => figures[field]));
    return {
      share: each[0].share,
      rate: add("rate_tokens_per_second"),
      bucket: add("bucket_tokens"),
      burst: add("burst_tokens"),
      throttled: add("throttled"),
      ready: add("ready"),
      inFlight: add("in_flight"),
      floor: sum(pools.map((pool) => pool.controller.floor_tokens_per_second[name])),
    };
  };
  return {
    capacity: sum(pools.map((pool) => pool.capacity_tokens_per_second)),
    nominal: sum(pools.map((pool) => pool.controller.nominal_capacity_tokens_per_second)),
    classes: Object.fromEntries(CLASSES.map((name) => [name, of(name)])),
  };
}

const badge = (text, kind) => element("li", kind ?? "", text);

function showBadges(state) {
  const laws = [...new Set(state.pools.map((pool) => pool.controller.law))].join(", ");
  const observed = CLASSES.filter((name) => state.modes[name] === "observe");
  const serving = state.draining ? badge("draining", "warn")
    : state.ready ? badge("serving", "good") : badge("no engine up", "bad");
  const mode = observed.length === 0 ? badge("enforce")
    : observed.length === CLASSES.length ? badge("observe: nothing is enforced", "warn")
      : badge(`observe: ${observed.join(", ")}`, "warn");
  find("badges").replaceChildren(...[
    serving, mode, badge(`law ${laws}`), ...fleetBadge(state.fleet),
    state.open_to_all ? badge("open, no keys") : null,
    state.set_at_run_time.length ? badge(`${state.set_at_run_time.length} set at run time`, "warn") : null,
    badge(`v${state.version}, up ${lasting(state.uptime_seconds)}`),
  ].filter(Boolean));
}

// One of several gateways that share a budget, and how it stands with the others.
function fleetBadge(fleet) {
  if (fleet === null) return [];
  const others = fleet.replicas > 1 ? `1 of ${fleet.replicas} gateways` : "alone in its fleet";
  const says = {
    shared: fleet.leads ? `${others}, sets the rates` : others,
    joining: "shared state not reached yet",
    holding: "shared state silent: keeps its share",
    alone: `shared state lost: 1/${fleet.replicas} of the budget`,
  };
  return [badge(says[fleet.state], { shared: "", holding: "warn" }[fleet.state] ?? "bad")];
}

function showGist(state, slo, sums) {
  const parts = [];
  const say = (kind, text) => element("strong", kind, text);
  const by = (standing) => CLASSES.filter((name) => slo.classes[name].standing === standing);
  const headline = (name) => slo.classes[name].attainment.arrival.admitted.all;
  if (state.draining) parts.push(say("warn", "Draining: no new request is taken. "));
  else if (!state.ready) parts.push(say("bad", "No engine is up: requests wait, then get 503. "));
  const down = state.pools.flatMap((pool) => Object.entries(pool.upstreams)).filter(([, slots]) => !slots.healthy).map(([name]) => name);
  if (state.ready && down.length) parts.push(say("bad", `Down: ${down.join(", ")}. `));
  for (const name of by("broken")) {
    parts.push(say("bad", `${name} breaks its promise: `), `${percent(headline(name).ratio)} of ${whole(headline(name).counted)} answers in time, target ${percent(slo.target)}. `);
  }
  for (const name of by("at_risk")) {
    parts.push(say("warn", `${name} is at risk: `), `${percent(headline(name).ratio)} of ${whole(headline(name).counted)}, target ${percent(slo.target)}. `);
  }
  const kept = by("kept");
  if (kept.length) parts.push(say("good", `${kept.join(" and ")} ${kept.length > 1 ? "keep their promises" : "keeps its promise"}. `));
  if (!by("broken").length && !by("at_risk").length && !kept.length) parts.push("No answer with a promise in the last minute. ");
  const cut = state.fleet !== null ? [] : CLASSES.filter((name) => sums.classes[name].rate < 0.995 * sums.classes[name].share * sums.nominal);
  const ratio = sums.capacity / sums.nominal;
  if (Math.abs(ratio - 1) > 0.005) {
    parts.push(`Capacity is ${short(sums.capacity)} tokens/s, ${Math.round(Math.abs(ratio - 1) * 100)} % ${ratio < 1 ? "below" : "above"} the configured ${short(sums.nominal)}${cut.length ? `; cut: ${cut.join(", ")}` : ""}. `);
  }
  const refused = CLASSES.map((name) => [name, refusals(slo.classes[name].endings_last_minute)]).filter(([, count]) => count);
  if (refused.length) parts.push(`Refused in the last minute: ${refused.map(([name, count]) => `${whole(count)} ${name}`).join(", ")}.`);
  find("gist").replaceChildren(...parts);
  speak([state.draining && "draining", !state.ready && "no engine is up",
    ...CLASSES.filter((name) => ["kept", "at_risk", "broken"].includes(slo.classes[name].standing))
      .map((name) => `${name} ${VERDICTS[slo.classes[name].standing].slice(2)}`)].filter(Boolean).join(", "));
}

// Said to screen readers when it is another, not when figures move.
function speak(text) {
  if (text !== spoken) {
    spoken = text;
    find("spoken").textContent = text;
  }
}

const refusals = (counts) => sum(Object.entries(counts)
  .filter(([outcome]) => outcome.startsWith("rejected_") || outcome === "queue_timeout").map(([, count]) => count));

// ── a class ──────────────────────────────────────────────────────────────────────────────────────────────

function showClasses(state, slo, sums) {
  find("classes").replaceChildren(...CLASSES.map((name, index) =>
    classCard(name, index, state.modes[name], slo, sums)));
}

function classCard(name, index, mode, slo, sums) {
  const promise = slo.classes[name];
  const figures = sums.classes[name];
  const card = element("article", `class ${name}`);
  card.append(
    element("h3", "", element("span", "name", name), element("span", "word", WORDS[name]),
      mode === "observe" ? element("span", "word", "observed only") : null,
      element("span", `verdict ${promise.standing}`, VERDICTS[promise.standing])),
    ...headline(name, index, promise, slo),
    rows(name, index, promise, figures, sums),
  );
  return card;
}

function headline(name, index, promise, slo) {
  const admitted = promise.attainment.arrival.admitted;
  const offered = promise.attainment.arrival.offered;
  if (promise.standing === "no_promise") {
    const done = promise.endings_last_minute.completed ?? 0;
    const rates = perSecond(index);
    return [
      element("div", "headline", element("span", "figure", whole(done), element("small", "", " completed in a minute")),
        spark(rates, { label: `${name}: requests a second` })),
      element("p", "under", "Runs on what the others leave, and on its share."),
    ];
  }
  const low = Math.min(slo.tighten_below - 0.05, ...samples.map((each) => each.attainment_of_admitted[index] ?? 1));
  const under = admitted.all.counted || offered.all.counted
    ? `of ${whole(admitted.all.counted)} admitted in time; target ${percent(slo.target)}. Of ${whole(offered.all.counted)} offered ${percent(offered.all.ratio)}. First token ${percent(admitted.ttft.ratio)}, per token ${percent(admitted.tpot.ratio)}.`
    : `no streamed answer in the last ${whole(slo.window_seconds)} s; target ${percent(slo.target)}.`;
  return [
    element("div", "headline", element("span", "figure", percent(admitted.all.ratio)),
      spark(series((each) => each.attainment_of_admitted[index]),
        { low: Math.max(low, 0), high: 1.002, mark: slo.target, label: `${name}: attainment; target ${percent(slo.target)}` })),
    element("p", "under", under),
  ];
}

function perSecond(index) {
  return samples.slice(1).map((sample, place) => {
    const before = samples[place];
    const span = before.seconds_ago - sample.seconds_ago || 1;
    return [sample.seconds_ago, (sample.ended_total[index] - before.ended_total[index]) / span];
  });
}

function rows(name, index, promise, figures, sums) {
  const due = figures.share * sums.nominal;
  const off = Math.round((figures.rate / (due || 1) - 1) * 100);
  const list = element("dl", "rows");
  const row = (term, ...parts) => {
    const [value, picture] = parts;
    list.append(element("div", "", element("dt", "", term), element("dd", "", ...value), element("dd", "", picture ?? null)));
  };
  row("First token", latency(promise, "ttft"), limit(promise, "ttft_seconds"));
  row("Per token", latency(promise, "tpot"), limit(promise, "tpot_seconds"));
  row("Max gap", latency(promise, "max_gap"), limit(promise, "max_gap_seconds"));
  row("Tokens/s", [short(figures.rate), off ? element("span", off < 0 ? "warn" : "quiet", ` ${off > 0 ? "+" : "−"}${Math.abs(off)} % on its share`) : quiet(" its share")],
    spark(series((each) => each.rate_tokens_per_second[index]), { mark: due, label: `${name}: rate` }));
  row("Bucket", [figures.bucket < 0 ? element("span", "warn", `−${short(-figures.bucket)} (debt)`) : short(figures.bucket), quiet(` of ${short(figures.burst)}`)],
    level(figures.bucket, figures.burst, `${name}: bucket`));
  row("Waiting", [whole(figures.throttled + figures.ready), figures.throttled + figures.ready ? quiet(` (${figures.throttled} for tokens, ${figures.ready} for a place)`) : null],
    spark(series((each) => each.waiting[index]), { label: `${name}: requests waiting` }));
  row("In flight", [whole(figures.inFlight)],
    spark(series((each) => each.in_flight[index]), { label: `${name}: requests in flight` }));
  const refused = pace("refused_total", index);
  row("Requests", [`${pace("ended_total", index).toFixed(1)}/s `, refused > 0.05 ? element("span", "over", `${refused.toFixed(1)}/s refused`) : quiet("none refused")],
    spark(perSecond(index), { label: `${name}: requests a second` }));
  return list;
}

function latency(promise, what) {
  const { p50, p99 } = promise.quantiles_seconds[what];
  if (p50 === null) return [quiet("–")];
  const target = promise.targets?.[`${what}_seconds`] ?? null;
  const high = element("span", target !== null && p99 > target ? "over" : "", seconds(p99));
  return [seconds(p50), quiet(", P99 "), high];
}

function limit(promise, name) {
  const target = promise.targets?.[name] ?? null;
  return target === null ? null : quiet(`≤ ${seconds(target)}`);
}

function level(value, full, label) {
  const svg = drawn("svg", { class: "level", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": `${label} ${whole(value)} of ${whole(full)}` });
  const part = Math.min(Math.abs(value) / (full || 1), 1) * 100;
  svg.append(drawn("rect", { class: value < 0 ? "debt" : "", width: part, height: 8, x: 0, y: 0, rx: 2 }));
  return svg;
}

// ── capacity and changes ─────────────────────────────────────────────────────────────────────────────────

function showCapacity(sums) {
  const height = 200;
  const width = span();
  const high = Math.max(sums.nominal, ...samples.map((each) => each.capacity_tokens_per_second)) * 1.1;
  const y = (value) => height - (value / high) * height;
  const svg = drawn("svg", {
    viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `Rates of the classes, one above the other; together ${whole(sums.capacity)} tokens a second, configured ${whole(sums.nominal)}`,
  });
  for (const part of [0, 0.5, 1]) svg.append(drawn("line", { class: "axis", x1: 0, x2: width, y1: part * height, y2: part * height }));
  const x = (sample) => (width - sample.seconds_ago).toFixed(1);
  const stacked = (sample, upTo) => y(sum(sample.rate_tokens_per_second.slice(0, upTo))).toFixed(1);
  CLASSES.forEach((name, index) => {
    if (samples.length < 2) return;
    const upper = samples.map((sample) => `${x(sample)} ${stacked(sample, index + 1)}`);
    const lower = samples.map((sample) => `${x(sample)} ${stacked(sample, index)}`).reverse();
    svg.append(drawn("path", { class: `area ${name}`, d: `M${[...upper, ...lower].join("L")}Z` }));
  });
  svg.append(drawn("path", {
    class: "mark", fill: "none",
    d: linePath(series((each) => each.nominal_tokens_per_second), 0, high, height),
  }));
  find("capacity-title").textContent = `Capacity, ${spanWords()}`;
  find("capacity").replaceChildren(
    element("div", "scale", element("span", "", short(high)), element("span", "", short(high / 2)), element("span", "", "0")),
    svg,
    element("div", "times", element("span", "", ago(width)), element("span", "", "tokens a second"), element("span", "", "now")),
  );
  find("legend").replaceChildren(
    ...CLASSES.map((name) => element("span", `key ${name}`, `${name} ${short(sums.classes[name].rate)}`)),
    element("span", "", `together ${short(sums.capacity)}`),
    element("span", "dash", `configured ${short(sums.nominal)}`),
  );
}

function showController(state) {
  const told = state.pools.map((pool) => {
    const { law, severity, advice, advises_only } = pool.controller;
    if (law === "static") return "Law static: rates stay at their shares.";
    const near = severity === null ? "no reading in the last second" : `load is ${severity.toFixed(2)} of what promises bear (it cuts above 1)`;
    const of = state.pools.length > 1 ? ` (${Object.keys(pool.upstreams).join(", ")})` : "";
    const says = law === "severity" ? `Law severity${of}: ${near}.` : `Law ${law}${of}.`;
    return advises_only ? `${says} Observe mode: it only advises${advice ? ` (${REASONS[advice.reason] ?? advice.reason})` : ""}.` : says;
  });
  find("controller").textContent = [...new Set(told)].join(" ");
}

// A law that acts every second would fill the list: neighbours of one kind, direction and reason are one line.
function grouped(changes) {
  const groups = [];
  for (const change of changes) {
    const group = groups[groups.length - 1];
    if (group && change.kind === "rates" && group.kind === "rates"
      && change.what.reason === group.what.reason && change.what.direction === group.what.direction
      && change.what.applied === group.what.applied
      && String(change.what.upstreams) === String(group.what.upstreams)
      && change.seconds_ago - group.since < 10) {
      group.since = change.seconds_ago;
      group.count += 1;
      group.from = change.what.old_rates_tokens_per_second;
    } else {
      groups.push({ ...change, since: change.seconds_ago, count: 1, from: change.what.old_rates_tokens_per_second });
    }
  }
  return groups;
}

function showChanges(changes) {
  const ofLaw = (change) => change.kind === "rates";
  const groups = [...grouped(changes.filter(ofLaw)).slice(0, 8), ...grouped(changes.filter((each) => !ofLaw(each))).slice(0, 6)]
    .sort((one, other) => one.seconds_ago - other.seconds_ago);
  find("changes").replaceChildren(...(groups.length ? groups.map(changeLine)
    : [element("li", "", element("span", "sign", ""), quiet("Nothing has changed since the start."))]));
}

function changeLine(group) {
  const [kind, sign, text, why] = group.kind === "rates" ? ratesWords(group)
    : group.kind === "upstream" ? upstreamWords(group) : operatorWords(group);
  const time = element("time", "", ago(group.seconds_ago));
  time.dateTime = group.ts;
  time.title = group.ts;
  return element("li", kind, element("span", "sign", sign), element("span", "", text), time, why ? element("span", "why", why) : null);
}

function ratesWords(group) {
  const from = group.from;
  const to = group.what.new_rates_tokens_per_second;
  const moved = CLASSES.map((name, index) => [name, to[index] - from[index]]).filter(([, by]) => Math.abs(by) >= 1)
    .map(([name, by]) => `${name} ${by > 0 ? "+" : "−"}${short(Math.abs(by))}`).join(", ");
  const signs = { up: "▲", down: "▼", shift: "⇄" };
  const advice = group.what.applied ? "" : "Advice: ";
  const total = group.what.direction === "shift" ? `Capacity stays at ${short(sum(to))}` : `Capacity ${short(sum(from))} → ${short(sum(to))}`;
  const times = group.count > 1 ? ` in ${group.count} steps` : "";
  const inputs = Object.entries(group.what.inputs).filter(([name]) => name.startsWith("x_"))
    .map(([name, value]) => `${name.slice(2)} ${value.toFixed(2)}`).join(", ");
  const where = severalPools ? `${group.what.upstreams.join(", ")}: ` : "";
  const why = `${where}${REASONS[group.what.reason] ?? group.what.reason}${inputs ? ` (${inputs} of the limit)` : ""}${moved ? `; ${moved}` : ""}`;
  return [group.what.direction, signs[group.what.direction] ?? "·", advice + total + times, why];
}

function upstreamWords({ what }) {
  const words = { up: "serves", down: "is down", trial: "may get one request as a trial" };
  return [what.state === "down" ? "bad" : "up", what.state === "down" ? "✗" : "✓", `Engine ${what.upstream} ${words[what.state] ?? what.state}`, null];
}

function operatorWords({ kind, what }) {
  const words = { settings: "Settings changed", reload: "Configuration reloaded", drain: "Drain begun" };
  const refused = { settings: "A change of settings was refused", reload: "A reload was refused" };
  const values = Object.entries(what.values).map(([name, { old, new: now }]) => `${name} ${plain(old)} → ${plain(now)}`);
  const shown = values.length > 4 ? [...values.slice(0, 4), `and ${values.length - 4} more`] : values;
  const by = `by ${what.operator ?? what.by}`;
  return [what.done ? "" : "bad", what.done ? "✎" : "✗", what.done ? words[kind] ?? kind : refused[kind] ?? kind,
    [what.reason, shown.join(", "), by].filter(Boolean).join("; ")];
}

const plain = (value) => (value === null ? "null" : typeof value === "object" ? JSON.stringify(value) : String(value));

// ── tables ───────────────────────────────────────────────────────────────────────────────────────────────

function table(id, heads, lines, nothing) {
  if (!lines.length) {
    find(id).replaceChildren(element("tbody", "", element("tr", "", element("td", "nothing", nothing))));
    return;
  }
  const head = element("tr", "", ...heads.map(([text, kind]) => {
    const cell = element("th", kind ?? "", text);
    cell.scope = "col";
    return cell;
  }));
  find(id).replaceChildren(element("thead", "", head), element("tbody", "", ...lines.map((line) => element("tr", "", ...line))));
}

function rowHead(content, className) {
  const cell = element("th", className ?? "", content);
  cell.scope = "row";
  return cell;
}

const number = (value) => element("td", value ? "number" : "number zero", typeof value === "number" ? whole(value) : value);
const classHeads = () => CLASSES.map((name) => [element("span", name, name), "number"]);

function showUpstreams(state) {
  const lines = state.pools.flatMap((pool) => Object.entries(pool.upstreams).map(([name, slots]) => {
    const health = slots.healthy ? ["✓ up", "good"] : slots.on_trial ? ["… on trial", "warn"] : ["✗ down", "bad"];
    const most = slots.max_in_flight === null ? "" : ` of ${slots.max_in_flight}`;
    return [
      rowHead(name, "name-cell"), element("td", health[1], health[0]),
      ...(severalPools ? [element("td", "name-cell", pool.models.join(", "))] : []),
      ...CLASSES.map((each) => number(slots.in_flight[each])),
      element("td", "number", `${sum(Object.values(slots.in_flight))}${most}`),
      number(slots.in_flight_tokens), number(slots.pending_prefill_tokens),
      element("td", "number", slots.engine_waiting === null ? "–" : Math.round(slots.engine_waiting)),
      element("td", slots.engine_kv_usage > 0.9 ? "number bad" : "number", slots.engine_kv_usage === null ? "–" : Math.round(slots.engine_kv_usage * 100) + " %"),
    ];
  }));
  table("upstreams", [["Engine"], ["Health"], ...(severalPools ? [["Models"]] : []), ...classHeads(), ["In flight", "number"],
    ["Tokens", "number"], ["Prefill due", "number"], ["Its queue", "number"], ["KV", "number"]], lines, "No engine is configured.");
}

function showEndings(slo) {
  const seen = new Set(CLASSES.flatMap((name) => Object.keys(slo.classes[name].endings_last_minute)));
  const order = Object.keys(OUTCOMES).filter((outcome) => seen.has(outcome));
  const lines = order.map((outcome) => {
    const kind = outcome === "completed" ? "good" : outcome.startsWith("upstream_") || outcome === "internal_error" ? "bad" : "";
    const head = rowHead(element("span", kind, OUTCOMES[outcome]));
    head.title = outcome;
    const total = sum(CLASSES.map((name) => slo.classes[name].endings_total[outcome] ?? 0));
    return [head, ...CLASSES.map((name) => number(slo.classes[name].endings_last_minute[outcome] ?? 0)), number(total)];
  });
  table("endings", [["Ending"], ...classHeads(), ["Since start", "number"]], lines, "No request ended in the last minute.");
}

function showTenants({ tenants, total }) {
  const left = (bucket) => element("td", "number", bucket === null ? quiet("no limit") : `${short(bucket.left)} of ${short(bucket.per_minute)}`);
  const lines = tenants.map((tenant) => [
    rowHead(tenant.tenant || "(none)", "name-cell"),
    ...CLASSES.map((name) => {
      const [waiting, running] = [tenant.waiting[name], tenant.in_flight[name]];
      return element("td", waiting + running ? "number" : "number zero", waiting ? `${running} + ${waiting}` : String(running));
    }),
    left(tenant.tokens), left(tenant.requests),
  ]);
  table("tenants", [["Tenant"], ...classHeads(), ["Tokens a minute", "number"], ["Requests a minute", "number"]], lines, "Nobody is here.");
  find("tenants-title").textContent = `Busiest tenants (in flight + waiting)${total > tenants.length ? `, ${tenants.length} of ${total}` : ""}`;
}

function showDecisions({ decisions }) {
  const ms = (value) => element("td", "number", value === null ? "–" : seconds(value / 1000));
  const lines = decisions.map((each) => {
    const kind = each.outcome === "completed" ? "" : each.outcome.startsWith("upstream_") || each.outcome === "internal_error" ? "bad" : "warn";
    const outcome = element("td", kind, OUTCOMES[each.outcome] ?? each.outcome);
    outcome.title = each.request_id;
    return [
      element("td", "", quiet(ago(each.seconds_ago))), element("td", "", element("span", each.priority, each.priority)),
      element("td", "name-cell", each.tenant || "–"), outcome, ms(each.queue_ms), ms(each.ttft_ms),
      element("td", "number", each.input_tokens === null ? "–" : `${short(each.input_tokens)} → ${short(each.output_tokens)}`),
    ];
  });
  table("decisions", [["Ended"], ["Class"], ["Tenant"], ["Ending"], ["Waited", "number"], ["First token", "number"], ["Tokens", "number"]],
    lines, "No request has ended yet.");
}

// ── asking ───────────────────────────────────────────────────────────────────────────────────────────────

class NeedsToken extends Error {}
class NoAnswer extends Error {}
class Refused extends Error {}

async function ask(path) {
  const token = sessionStorage.getItem("operations-token");
  const answer = await fetch(path, {
    headers: token ? { authorization: `Bearer ${token}` } : {}, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS),
  }).catch((error) => { throw new NoAnswer(error.message); });
  if (answer.status === 401) throw new NeedsToken();
  const body = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(`status ${answer.status}${body?.error?.message ? `, ${body.error.message}` : ""}`);
  if (body === null) throw new Refused(`${path} is not JSON`);
  return body;
}

function remember(past) {
  samples.push(...past.samples);
  if (!samples.length) return;
  lastNumber = last().number;
  const newest = last().seconds_ago;
  for (const sample of samples) sample.seconds_ago = newest + (lastNumber - sample.number) * past.interval_seconds;
  while (samples[0].seconds_ago > SPAN_SECONDS_MAX) samples.shift();
}

async function refresh() {
  const slow = turns % SLOW_EVERY === 0;
  const answers = await Promise.all([
    ask("/admin/state"), ask("/admin/slo"), ask(`/admin/history?after=${lastNumber}`), ask("/admin/changes?limit=40"),
    ...(slow ? [ask("/admin/tenants?limit=10"), ask("/admin/decisions?limit=12")] : []),
  ]);
  const [state, slo, past, { changes }, tenants, decisions] = answers;
  if (state.uptime_seconds < lastUptime) forget(); // another process answers now
  else remember(past);
  lastUptime = state.uptime_seconds;
  turns += 1;
  find("door").hidden = true;
  find("board").hidden = false;
  if (samples.length) draw(state, slo, changes, tenants, decisions);
  lastAnswerAt = performance.now(); // only what has been drawn is up to date
}

function draw(state, slo, changes, tenants, decisions) {
  const figures = totals(state);
  severalPools = state.pools.length > 1;
  showBadges(state);
  showGist(state, slo, figures);
  showClasses(state, slo, figures);
  showCapacity(figures);
  showController(state);
  showChanges(changes);
  showUpstreams(state);
  showEndings(slo);
  if (tenants) showTenants(tenants);
  if (decisions) showDecisions(decisions);
}

function forget() {
  samples.length = 0;
  lastNumber = 0;
}

async function turn() {
  clearTimeout(timer);
  if (busy) return;
  busy = true;
  try {
    await refresh();
    trouble = null;
  } catch (error) {
    if (error instanceof NeedsToken) {
      showDoor();
      return;
    }
    trouble = error;
  } finally {
    busy = false;
  }
  showAge();
  if (document.visibilityState === "visible") timer = setTimeout(turn, REFRESH_MS); // nobody looks: nobody is asked
}

function showAge() {
  const age = lastAnswerAt === null ? null : performance.now() - lastAnswerAt;
  const gone = trouble !== null && (age === null || age > STALE_MS);
  document.body.classList.toggle("is-stale", gone);
  find("stale").hidden = !gone;
  if (gone) {
    const what = trouble instanceof NoAnswer ? "No answer from the gateway"
      : trouble instanceof Refused ? "Errors from the gateway" : "Answers from the gateway that this page cannot show";
    const since = age === null ? "" : ` for ${lasting(age / 1000)}`;
    const text = `${what}${since}: ${age === null ? "there are no figures yet" : "the figures below are old"} (${trouble.message}).`;
    if (find("stale").textContent !== text) find("stale").textContent = text;
  }
  find("age").textContent = !find("door").hidden ? "waiting for the token" : age === null ? "connecting …" : age < 2500 ? "live" : `${Math.round(age / 1000)} s old`;
}

function showDoor() {
  const tried = sessionStorage.getItem("operations-token") !== null;
  sessionStorage.removeItem("operations-token");
  if (tried) find("door-says").textContent = "That token is not the gateway's. It stands in its configuration as server.operations_token.";
  find("board").hidden = true;
  find("door").hidden = false;
  find("token").value = "";
  find("token").focus();
  showAge();
}

// A link brings no token along.
find("api").addEventListener("click", async (event) => {
  if (!sessionStorage.getItem("operations-token")) return;
  event.preventDefault();
  const page = await ask("/openapi.json").catch(() => null);
  const text = JSON.stringify(page, null, 2);
  if (page) location.assign(URL.createObjectURL(new Blob([text], { type: "application/json" })));
});

find("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("operations-token", find("token").value);
  turn();
});

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (document.visibilityState === "visible" && find("door").hidden) turn();
});

setInterval(showAge, 500);
turn();
