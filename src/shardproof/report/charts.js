const HEIGHT = 180, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22;
const views = new Map();  // of charts, by title
let page = { runs: [], charts: { charts: [], groups: [], constant: [] } };
let drag = null;

function ticks(low, high, count, smallest) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  if (!(rough > 0) || !Number.isFinite(rough) || !(power > 0)) return [low];
  const gap = Math.max(smallest, power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999));
  const from = Math.ceil(low / gap - 1e-9), to = Math.floor(high / gap + 1e-9);
  return Array.from({ length: Math.min(50, to - from + 1) }, (_, index) => (from + index) * gap);
}
function powers(low, high) {
  const from = Math.ceil(low), to = Math.floor(high), every = Math.max(1, Math.ceil((to - from) / 5));
  if (to - from < 1) return ticks(10 ** low, 10 ** high, 4, 0).filter(value => value > 0);
  return Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, index) => 10 ** (from + index * every));
}
function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) if (Number.isFinite(value)) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}
// The exponential moving average, corrected for its start; gaps stay gaps.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}
function prepare(series) {
  const run = page.runs[series.run];
  let at = 0;
  const places = series.places ? series.places.map(gap => (at += gap)) : series.values.map((_, index) => index);
  const steps = places.map(place => run.steps[place]), times = places.map(place => run.times[place]);
  return Object.assign(series, { steps, times, tone: page.runs.length > 1 ? series.run : null });
}
function label(chart, series) {
  if (page.runs.length > 1) return page.runs[series.run].header.name;
  return chart.series.length > 1 ? series.name.split("/").pop() : "";
}
const isLog = view => (state.log || state.logs.has(view.chart.title)) && view.hasPositive;

function makeView(title) {
  const view = { title };
  view.name = make("span", { class: "name" }, title);
  view.at = make("span", { class: "at" });
  view.keys = make("span", { class: "keys" });
  view.same = make("small", { class: "same" });
  view.button = make("button", { type: "button", class: "log", "aria-pressed": "false", "aria-label": `logarithmic axis for ${title}`, onclick: () => {
    if (!state.logs.delete(title)) state.logs.add(title);
    redraw();
  } }, "log");
  view.svg = draw("svg", { height: HEIGHT, role: "img", tabindex: "0", "aria-label": `curve of ${title}; arrow keys move the crosshair, plus and minus zoom` });
  view.figure = make("figure", { "data-chart": title }, view.button,
    make("figcaption", {}, view.name, view.at, view.same, view.keys), view.svg);
  listen(view);
  return view;
}
function setChart(view, chart) {
  view.chart = chart;
  chart.series.forEach(prepare);
  view.hasPositive = chart.series.some(series => series.values.some(value => value > 0));
  view.same.textContent = chart.same.length ? `= ${chart.same.join(" = ")}` : "";
  view.keys.replaceChildren(...chart.series.map((series, index) => {
    series.tone = series.tone === null ? index : series.tone;
    series.readout = make("b", {});
    series.smoothReadout = make("small", {});
    return make("span", { class: `key s${series.tone % 8}` }, make("i", {}), label(chart, series) + " ", series.readout, series.smoothReadout,
      series.missing ? make("small", {}, ` (${series.missing} not finite)`) : null);
  }));
}
function range() {
  if (state.zoom) return state.zoom;
  const lists = page.charts.charts.flatMap(chart => chart.series.map(series => state.x === "step" ? series.steps : series.times));
  const [low, high] = extent(lists) || [0, 1];
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}
// The points in sight with one neighbour on each side, and of many in one pixel column the lowest and the highest.
function inSight(xs, values, [first, last], width) {
  let begin = 0, end = xs.length - 1;
  while (begin < end && xs[begin + 1] < first) begin += 1;
  while (end > begin && xs[end - 1] > last) end -= 1;
  const places = [];
  if (end - begin < 2 * width) {
    for (let place = begin; place <= end; place += 1) places.push(place);
    return places;
  }
  let column = null, low = 0, high = 0;
  const flush = () => { if (column !== null) places.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)])); };
  for (let place = begin; place <= end; place += 1) {
    if (values[place] === null) { flush(); places.push(place); column = null; continue; }
    const now = Math.floor((xs[place] - first) / (last - first) * width);
    if (now !== column) { flush(); column = now; low = high = place; }
    if (values[place] < values[low]) low = place;
    if (values[place] > values[high]) high = place;
  }
  flush();
  return places;
}
function reach(series, place, sign) { // how far below or above a value its band ends
  const ends = series.band[place];
  return ends ? sign * ends[sign < 0 ? 0 : 1] : 0;
}
function bandText(series, place) {
  const ends = series.band && place !== null ? series.band[place] : null, value = ends ? series.values[place] : null;
  if (value === null || !(ends[0] || ends[1])) return "";
  return ends[0] === ends[1] ? ` ± ${Number(ends[0].toPrecision(2))}` : ` (${format(value - ends[0])} to ${format(value + ends[1])})`;
}
function limits(view, xs, [first, last], log) {
  const seen = view.chart.series.flatMap((series, index) => {
    const visible = series.values.filter((value, at) => xs[index][at] >= first && xs[index][at] <= last && (!log || value > 0));
    if (!series.band || log) return [visible];
    const edge = sign => series.values.map((value, at) => xs[index][at] >= first && xs[index][at] <= last && value !== null
      ? value + reach(series, at, sign) : null);
    return [visible, edge(1), edge(-1)];
  });
  let [low, high] = extent(seen) || [log ? 0.1 : 0, 1];
  if (log) [low, high] = [Math.log10(low), Math.log10(high)];
  const room = high > low ? (high - low) * 0.06 : Math.abs(low) * 0.1 || 0.5;
  return [low - room, high + room];
}
function drawChart(view, [first, last]) {
  const { svg, chart, width } = view, log = isLog(view), floor = HEIGHT - BOTTOM;
  view.button.setAttribute("aria-pressed", String(log));
  view.button.disabled = !view.hasPositive || state.log;
  const xs = chart.series.map(series => state.x === "step" ? series.steps : series.times);
  const [low, high] = limits(view, xs, [first, last], log);
  const x = at => LEFT + (at - first) / (last - first) * (width - LEFT - RIGHT);
  const y = value => TOP + (high - (log ? Math.log10(value) : value)) / (high - low) * (floor - TOP);
  const shows = value => value !== null && (!log || value > 0);
  Object.assign(view, { x, y, shows, toX: pixel => first + (pixel - LEFT) / (width - LEFT - RIGHT) * (last - first) });
  const plot = draw("svg", { class: "plot", x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: floor - TOP,
    viewBox: `${LEFT} ${TOP} ${width - LEFT - RIGHT} ${floor - TOP}` });
  const parts = [];
  for (const value of log ? powers(low, high) : ticks(low, high, 5, 0)) {
    parts.push(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  parts.push(draw("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: floor, y2: floor }));
  for (const at of ticks(first, last, Math.min(6, width / 70), state.x === "step" ? 1 : 0))
    parts.push(draw("text", { x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, state.x === "step" ? format(at) : shortTime(at)));
  if (page.runs.length === 1 && state.x === "step") for (const step of page.runs[0].skipped.slice(-500))
    if (step >= first && step <= last) plot.append(draw("line", { class: "skip", x1: x(step), x2: x(step), y1: floor - 7, y2: floor }));
  chart.series.forEach((series, index) => drawSeries(plot, view, series, xs[index], [first, last]));
  view.cross = draw("g", {});
  view.brush = draw("rect", { class: "brush", y: TOP, height: floor - TOP, visibility: "hidden" });
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren(...parts, plot, view.brush, view.cross);
}
function drawSeries(plot, view, series, xs, range) {
  const { x, y, shows } = view, tone = `s${series.tone % 8}`;
  const places = inSight(xs, series.values, range, view.width);
  const smooth = state.smooth > 0 && view.chart.group !== "Evaluation" ? smoothed(series.values, state.smooth) : null;
  if (series.band && !isLog(view)) {
    const known = places.filter(place => series.values[place] !== null && series.band[place] !== null);
    const edge = (list, sign) => list.map(place => `${x(xs[place]).toFixed(1)} ${y(series.values[place] + reach(series, place, sign)).toFixed(1)}`);
    if (known.length > 1) plot.append(draw("path", { class: `band ${tone}`, d: `M${edge(known, 1).join("L")}L${edge(known.slice().reverse(), -1).join("L")}Z` }));
    for (const place of known) plot.append(draw("line", { class: `whisker ${tone}`, x1: x(xs[place]), x2: x(xs[place]),
      y1: y(series.values[place] + reach(series, place, -1)), y2: y(series.values[place] + reach(series, place, 1)) }));
  }
  const path = values => {
    let text = "", join = false;
    for (const place of places) {
      const value = values[place], there = shows(value) && Number.isFinite(xs[place]);
      // The line of no length makes a value between two gaps a dot, not nothing.
      if (there) text += `${join ? "L" : "M"}${x(xs[place]).toFixed(1)} ${y(value).toFixed(1)}h0`;
      join = there;
    }
    return text;
  };
  plot.append(draw("path", { class: `curve ${tone}${smooth ? " raw" : ""}`, d: path(series.values) }));
  if (smooth) plot.append(draw("path", { class: `curve smooth ${tone}`, d: path(smooth) }));
  else if (places.length <= 40) for (const place of places) if (shows(series.values[place]) && Number.isFinite(xs[place]))
    plot.append(draw("circle", { class: `dot ${tone}`, cx: x(xs[place]), cy: y(series.values[place]), r: 2.2 }));
  series.smoothValues = smooth;
}
function shortTime(seconds) {
  if (Math.abs(seconds) < 120) return `${format(seconds)} s`;
  return Math.abs(seconds) < 7200 ? `${format(seconds / 60)} min` : `${format(seconds / 3600)} h`;
}
// The place of a series at or near an x: exact where every point is there, the nearest where curves were thinned.
function placeAt(series, at) {
  const xs = state.x === "step" ? series.steps : series.times;
  let low = 0, high = xs.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < at) low = middle + 1; else high = middle; }
  if (low > 0 && Math.abs(xs[low - 1] - at) <= Math.abs(xs[low] - at)) low -= 1;
  const near = series.thinned || (page.runs.length > 1 && state.x === "time");
  const allowed = near ? (xs[xs.length - 1] - xs[0]) / 50 : 0;
  return xs.length && Math.abs(xs[low] - at) <= allowed ? low : null;
}
function show(at) {
  state.hover = at;
  for (const view of views.values()) {
    if (!view.cross) continue;
    const xs = view.chart.series.map(series => state.x === "step" ? series.steps : series.times);
    const end = Math.max(...xs.map(list => list[list.length - 1]));
    const here = at === null ? end : at, words = state.x === "step" ? `step ${format(here)}` : shortTime(here);
    view.at.textContent = (at === null ? "last: " : "") + words;
    const marks = at === null ? [] : [draw("line", { class: "cross", x1: view.x(at), x2: view.x(at), y1: TOP, y2: HEIGHT - BOTTOM })];
    for (const [index, series] of view.chart.series.entries()) {
      const place = at === null && page.runs.length > 1 ? xs[index].length - 1 : placeAt(series, here);
      const value = place === null ? undefined : series.values[place];
      const smooth = Number.isFinite(value) && series.smoothValues ? ` smoothed ${format(series.smoothValues[place])}` : "";
      series.smoothReadout.textContent = smooth;
      series.readout.textContent = format(value) + bandText(series, place);
      if (at !== null && Number.isFinite(value) && view.shows(value))
        marks.push(draw("circle", { class: `dot s${series.tone % 8}`, cx: view.x(xs[index][place]), cy: view.y(value), r: 4 }));
    }
    const [first, last] = range();
    view.cross.replaceChildren(...(at !== null && at >= first && at <= last ? marks : []));
  }
}
// `#hover=STEP` in the address holds the crosshair at a step, so that a link can point at it.
function showHash() {
  const match = /^#hover=(\d+)$/.exec(location.hash);
  const step = match && page.runs.length ? Number(match[1]) : null;
  if (step === null || state.x === "step") return show(step);
  show(page.runs[0].times[page.runs[0].steps.indexOf(step)] ?? null);
}
function nearest(view, pixel) {
  const at = view.toX(pixel);
  let best = null;
  for (const series of view.chart.series) for (const x of state.x === "step" ? series.steps : series.times)
    if (Number.isFinite(x) && (best === null || Math.abs(x - at) < Math.abs(best - at))) best = x;
  return best;
}
function zoomTo(first, last) {
  const smallest = state.x === "step" ? 1 : 1e-3;
  state.zoom = last - first >= smallest ? [first, last] : state.zoom;
  redraw();
}
function listen(view) {
  const { svg } = view, pixel = event => event.clientX - svg.getBoundingClientRect().left;
  const inside = at => Math.min(Math.max(at, LEFT), view.width - RIGHT);
  svg.addEventListener("pointerdown", event => {
    if (event.button !== 0) return;
    drag = { view, from: inside(pixel(event)), to: null };
    try { svg.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone already */ }
  });
  svg.addEventListener("pointermove", event => {
    if (drag && drag.view === view) {
      drag.to = inside(pixel(event));
      const [from, to] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)];
      if (to - from > 6) fill(view.brush, { x: from, width: to - from, visibility: "visible" }, []);
    }
    show(nearest(view, pixel(event)));
  });
  svg.addEventListener("pointerup", () => {
    const done = drag;
    drag = null;
    if (!done || done.to === null || Math.abs(done.to - done.from) <= 6) return;
    zoomTo(view.toX(Math.min(done.from, done.to)), view.toX(Math.max(done.from, done.to)));
  });
  svg.addEventListener("pointercancel", () => { drag = null; view.brush.setAttribute("visibility", "hidden"); });
  svg.addEventListener("pointerleave", () => { if (!drag) showHash(); });
  svg.addEventListener("dblclick", resetZoom);
  svg.addEventListener("blur", showHash);
  svg.addEventListener("keydown", event => onKey(view, event));
}
function onKey(view, event) {
  const xs = [...new Set(view.chart.series.flatMap(series => state.x === "step" ? series.steps : series.times))].sort((a, b) => a - b);
  const [first, last] = range(), middle = state.hover === null ? (first + last) / 2 : state.hover;
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (move) {
    const visible = xs.filter(x => x >= first && x <= last), at = visible.indexOf(state.hover);
    if (visible.length) show(visible[at < 0 ? (move > 0 ? 0 : visible.length - 1) : Math.min(Math.max(at + move, 0), visible.length - 1)]);
  } else if (event.key === "+" || event.key === "-") {
    const factor = event.key === "+" ? 0.25 : 1, size = (last - first) * factor, hover = state.hover;
    if (event.key === "-" && state.zoom === null) return;
    zoomTo(middle - size, middle + size);
    show(hover);
  } else if (event.key === "Escape") { resetZoom(); } else return;
  event.preventDefault();
}
function resetZoom() { state.zoom = null; redraw(); }

// While a slider moves, the charts in sight follow it at once, and the others when it rests.
let waiting = 0, resting = 0;
function redrawSoon() {
  cancelAnimationFrame(waiting);
  clearTimeout(resting);
  waiting = requestAnimationFrame(() => {
    const seen = range(), inWindow = view => { const { top, bottom } = view.figure.getBoundingClientRect(); return bottom > 0 && top < innerHeight; };
    for (const view of [...views.values()].filter(view => !view.figure.hidden && inWindow(view))) drawChart(view, seen);
    resting = setTimeout(redraw, 150);
  });
}
// Groups of one or two charts share a row of three, and the last of a row fills it.
function arrange() {
  const groups = [...document.querySelectorAll(".group")];
  let shown = 0, free = 3, last = null;
  for (const group of groups) {
    const num = group.querySelectorAll("figure:not([hidden])").length, span = Math.min(num, 3);
    group.hidden = num === 0;
    if (num === 0) continue;
    if (span > free) { if (last && free) last.dataset.span = String(Number(last.dataset.span) + free); free = 3; }
    Object.assign(group.dataset, { num: String(num), span: String(span) });
    [free, last] = [(free - span) || 3, free === span ? null : group];
    shown += num;
  }
  if (last) last.dataset.span = String(Number(last.dataset.span) + free);
  return shown;
}
function redraw() {
  clearTimeout(resting);
  const sought = state.search.trim().toLowerCase().split(/\s+/).filter(Boolean);
  for (const view of views.values()) {
    const text = [view.title, ...view.chart.same, ...view.chart.series.map(series => series.name)].join(" ").toLowerCase();
    view.figure.hidden = !sought.every(word => text.includes(word));
  }
  const shown = arrange();
  const visible = [...views.values()].filter(view => !view.figure.hidden);
  for (const view of visible) view.width = Math.max(200, view.svg.clientWidth || 380);  // all reads before all writes
  const seen = range();
  for (const view of visible) drawChart(view, seen);
  document.getElementById("reset").hidden = state.zoom === null;
  document.getElementById("found").textContent = sought.length ? `${shown} of ${views.size} charts` : "";
  if (state.hover === null) showHash(); else show(state.hover);
}
function controls() {
  const slider = make("input", { type: "range", id: "smooth", min: "0", max: "0.99", step: "0.01", value: "0", oninput: event => {
    state.smooth = Number(event.target.value);
    amount.textContent = state.smooth.toFixed(2);
    redrawSoon();
  } });
  const amount = make("output", { for: "smooth" }, "0.00");
  const xMode = value => make("label", {}, make("input", { type: "radio", name: "x", value, checked: value === state.x, onchange: () => {
    Object.assign(state, { x: value, zoom: null, hover: null });
    redraw();
  } }), value);
  return make("div", { id: "controls", role: "group", "aria-label": "chart controls" },
    make("label", { class: "grow" }, make("span", {}, "Search"), make("input", { type: "search", id: "search", placeholder: "name of a metric", oninput: event => {
      state.search = event.target.value;
      redraw();
    } })),
    make("label", {}, make("span", {}, "Smoothing"), slider, amount),
    make("label", {}, make("input", { type: "checkbox", id: "log", onchange: event => { state.log = event.target.checked; redraw(); } }), "log axis"),
    make("fieldset", {}, make("legend", {}, "x"), xMode("step"), xMode("time")),
    make("span", { id: "found", role: "status" }),
    make("button", { type: "button", id: "reset", hidden: true, onclick: resetZoom }, "Reset zoom"));
}
function makeCharts() {
  return section("curves", "Curves", controls(), make("div", { id: "groups" }), make("div", { id: "constants" }));
}
let arrangement = "";
function updateCharts() {
  const { charts, groups, constant, thinned, max_points } = page.charts;
  const titles = JSON.stringify([groups, charts.map(chart => [chart.title, chart.group])]);
  for (const chart of charts) {
    if (!views.has(chart.title)) views.set(chart.title, makeView(chart.title));
    setChart(views.get(chart.title), chart);
  }
  const kept = new Set(charts.map(chart => chart.title));
  for (const title of [...views.keys()]) if (!kept.has(title)) views.delete(title);
  if (titles !== arrangement) {  // moving a figure would take the focus away
    arrangement = titles;
    document.getElementById("groups").replaceChildren(...groups.map(group => make("section", { class: "group", "aria-label": group }, make("h3", {}, group),
      make("div", { class: "grid" }, charts.filter(chart => chart.group === group).map(chart => views.get(chart.title).figure)))));
  }
  document.getElementById("constants").replaceChildren(...[
    charts.length ? null : make("p", { class: "none" }, "No metrics yet."),
    constant.length ? make("p", { class: "constants" }, make("b", {}, "Constant: "),
      constant.map(({ name, value }, index) => [index ? ", " : "", make("span", {}, `${name} `, make("b", {}, format(value)))])) : null,
    thinned ? make("p", { class: "note" }, `Long curves are drawn with about ${max_points.toLocaleString("en")} points: the lowest and the highest value of each stretch of steps. metrics.jsonl has every step.`) : null,
  ].filter(Boolean));
}
