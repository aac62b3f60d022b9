const STATUS = { running: "running", finished: "finished", stopped: "stopped", failed: "failed", killed: "killed", unknown: "not finished" };

function statusPill(header) {
  const steps = header.step === null ? "no step yet" : `step ${header.step.toLocaleString("en")}` + (header.steps ? ` of ${header.steps.toLocaleString("en")}` : "");
  return [make("span", { class: `status ${header.status}` }, STATUS[header.status]), make("span", {}, steps)];
}
function headerSection({ header }) {
  const facts = [
    header.seconds !== null ? duration(header.seconds) : null,
    header.left_s ? `about ${duration(header.left_s)} left` : null,
    header.stale_s ? `nothing new for ${duration(header.stale_s)}: the run may have been killed` : null,
  ].filter(Boolean);
  const done = header.steps && header.step !== null ? Math.min(1, header.step / header.steps) : null;
  const bar = done !== null && header.status === "running" ? make("progress", { max: "1", value: String(done), "aria-label": "steps taken" }) : null;
  return make("header", {}, make("h1", {}, header.name), make("p", { class: "words" }, header.words.join(" · ")),
    make("p", { class: "state" }, statusPill(header), facts.map(text => make("span", {}, text))), bar);
}
function alertBox(alert, run) {
  const one = alert.items.length === 1;
  return details(`alert/${run}/${alert.kind}`, { class: `alert ${alert.tone}`, role: alert.tone === "bad" ? "alert" : null }, [
    make("b", {}, `${alert.title}: ${alert.num.toLocaleString("en")}`), " ", make("span", { class: "first" }, alert.items[0].text.split("\n")[0])],
  () => make("ul", {}, alert.items.map(item => make("li", {},
    make("div", { class: "dim" }, item.num > 1 ? `${item.num} times, steps ${item.first ?? "-"} to ${item.last ?? "-"}` : `step ${item.first ?? "-"}`),
    make("div", { class: "text" }, item.text)))), alert.tone === "bad" && one);
}
function alertsSection(run) {
  const { alerts, ledger, header } = run;
  const killed = header.status === "killed" ? make("p", { class: "alert bad", role: "alert" }, "The run was killed, or its machine ran out of memory or went down: nothing writes here any more. The same command resumes it from its last checkpoint.") : null;
  if (killed || alerts.length) return make("div", { id: "alerts" }, killed, alerts.map(alert => alertBox(alert, header.name)));
  if (header.status === "failed") return make("div", { id: "alerts" }, make("p", { class: "alert bad", role: "alert" }, "The run failed. The terminal, or the log of the job, has its last message."));
  const quiet = ledger.num > 0;
  return make("div", { id: "alerts" }, quiet ? make("p", { class: "quiet" }, "✓ No findings, no reward errors, no skipped steps.") : null);
}
function splitBar(parts) {
  const total = parts.reduce((sum, part) => sum + part.seconds, 0);
  const bar = make("div", { class: "split", role: "img", "aria-label": `where the time went: ${parts.map(part => `${part.name} ${Math.round(part.seconds / total * 100)}%`).join(", ")}` },
    parts.map((part, index) => { const piece = make("i", { class: `s${index % 8}`, title: `${part.name}: ${duration(part.seconds)}` }); piece.style.flexGrow = String(part.seconds / total); return piece; }));
  return make("div", { class: "tile wide" }, make("dt", {}, "Where the time went"), make("dd", { class: "split-box" }, bar,
    make("ul", { class: "legend" }, parts.map((part, index) => make("li", { class: `s${index % 8}` }, make("i", {}), `${part.name} `, make("b", {}, `${(part.seconds / total * 100).toFixed(part.seconds / total < 0.095 ? 1 : 0)}%`))))));
}
function numbersSection(run) {
  const tiles = run.numbers.map(({ label, value, more }) => make("div", { class: "tile" }, make("dt", {}, label), make("dd", {}, value), make("dd", { class: "more" }, more)));
  if (run.time.length) tiles.push(splitBar(run.time));
  return section("numbers", "Key numbers", tiles.length ? make("dl", { class: "tiles" }, tiles) : make("p", { class: "none" }, "None yet."));
}
function factsSection({ facts, events }) {
  return section("facts", "Run facts",
    facts.rows.length ? make("dl", { class: "facts" }, facts.rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))) : null,
    facts.changed.length ? [make("h3", {}, "Settings that differ from the defaults"),
      table({ id: "changed" }, ["Setting", "Value", "Default"], facts.changed.map(([key, value, standard]) => [make("code", {}, key), make("code", {}, value), make("code", { class: "dim" }, standard)]))] : null,
    events.num ? details("events", { id: "events", class: "card" }, `Other events (${events.num.toLocaleString("en")})`, () =>
      table({}, ["Step", "Kind", "What"], events.rows.map(row => [String(row.step ?? "-"), row.kind, make("div", { class: "text" }, [row.text, ...(row.details || []).map(pair => pair.join(": "))].filter(Boolean).join("\n"))]))) : null,
    details("config", { id: "config", class: "card" }, "All settings", () => make("pre", {}, facts.config || "config.json is not there.")));
}
const notesSection = runs => make("div", { id: "notes" }, runs.flatMap(run => run.notes.map(note => make("p", { class: "note" }, runs.length > 1 ? `${run.header.name}: ${note}` : note))));

function comparedRuns(runs) {
  const labels = [...new Set(runs.flatMap(run => run.numbers.map(number => number.label)))];
  const chip = (run, index) => make("span", { class: `key s${index % 8}` }, make("i", {}), run.header.name);
  const cell = (run, name) => { const number = run.numbers.find(each => each.label === name); return number ? [number.value, make("small", {}, ` ${number.more}`)] : "-"; };
  const problems = run => run.alerts.length ? run.alerts.map(alert => make("span", { class: `badge ${alert.tone}` }, `${alert.title}: ${alert.num}`)) : "none";
  const gap = run => { const all = run.ledger.groups.map(group => group.worst_gap).filter(Number.isFinite); return all.length ? format(Math.max(...all)) : "-"; };
  return [
    make("header", {}, make("h1", {}, plural(runs.length, "run")), make("p", { class: "words" }, runs.map(run => run.header.name).join(" · "))),
    section("ledger", "Proof ledger", table({ id: "proofs" }, ["Run", "Proofs", "By kind", "Worst canary gap", "Findings and errors"], runs.map((run, index) => [chip(run, index), verdictOf(run.ledger),
      run.ledger.groups.map(group => make("div", {}, badge(!group.failed, `${groupTitle(group)}: ${group.num - group.failed} of ${group.num}`))), gap(run), problems(run)]))),
    section("numbers", "Key numbers", table({ id: "compared" }, ["", ...runs.map(run => run.header.name)], [
      ["Algorithm and model", ...runs.map(run => run.header.words.join(" · ") || "-")],
      ["Status", ...runs.map(run => statusPill(run.header).flatMap(node => [node, " "]))],
      ["Duration", ...runs.map(run => run.header.seconds === null ? "-" : duration(run.header.seconds))],
      ...labels.map(name => [name, ...runs.map(run => cell(run, name))])])),
  ];
}
function comparedSettings(data) {
  return section("settings", "Settings that differ between these runs", data.settings.length
    ? table({ id: "differing" }, ["Setting", ...data.runs.map(run => run.header.name)], data.settings.map(([key, ...values]) => [make("code", {}, key), ...values.map(value => make("code", {}, value))]))
    : make("p", { class: "none" }, "None: the runs have the same settings, versions and data."));
}
// The sections above and below the curves. Each is built again only if its data changed, so that a live page stays still.
const parts = {
  header: data => headerSection(data.runs[0]), alerts: data => alertsSection(data.runs[0]), ledger: data => ledgerSection(data.runs[0]),
  numbers: data => numbersSection(data.runs[0]), samples: data => samplesSection(data.runs[0]), facts: data => factsSection(data.runs[0]),
};
const shownText = {};
function place(name, text, build) {
  if (shownText[name] === text) return;
  shownText[name] = text;
  document.getElementById(`part-${name}`).replaceChildren(...[build()].flat(Infinity));
}
function update(data) {
  page = data;
  if (data.runs.length === 1) {
    const run = data.runs[0], text = { header: run.header, alerts: [run.alerts, run.ledger.num, run.header.status], ledger: run.ledger,
      numbers: [run.numbers, run.time], samples: run.samples, facts: [run.facts, run.events] };
    for (const name of Object.keys(parts)) place(name, JSON.stringify(text[name]), () => parts[name](data));
  } else {
    place("header", JSON.stringify(data.runs.map(run => [run.header, run.ledger, run.numbers, run.alerts])), () => comparedRuns(data.runs));
    place("numbers", JSON.stringify(data.settings), () => comparedSettings(data));
  }
  place("notes", JSON.stringify(data.runs.map(run => run.notes)), () => notesSection(data.runs));
  updateCharts();
  redraw();
}
function start() {
  const slot = name => make("div", { id: `part-${name}` });
  document.getElementById("main").replaceChildren(...["header", "alerts", "notes", "ledger", "numbers"].map(slot), makeCharts(), ...["samples", "facts"].map(slot));
  update(JSON.parse(document.getElementById("data").textContent));
  addEventListener("hashchange", showHash);
  addEventListener("resize", redrawSoon);
  if (document.documentElement.hasAttribute("data-live")) follow();
}
// A live page: asks its own server for what is new, less often where an answer takes long.
async function follow() {
  const lost = make("p", { id: "lost", class: "quiet", role: "status", hidden: true }, "The connection to `shardproof watch` is lost; this page shows what it saw last.");
  document.getElementById("main").prepend(lost);
  let version = "";
  for (;;) {
    let pause = 1000;
    try {
      const began = performance.now();
      const answer = await fetch(`data.json?version=${encodeURIComponent(version)}`, { cache: "no-store" });
      if (answer.status === 200) {
        const fresh = await answer.json();
        while (drag) await new Promise(done => setTimeout(done, 200));
        version = fresh.version;
        update(fresh.data);
      }
      lost.hidden = answer.ok || answer.status === 304;
      pause = Math.max(1000, 5 * (performance.now() - began));
    } catch { lost.hidden = false; }
    await new Promise(done => setTimeout(done, pause));
  }
}
start();
