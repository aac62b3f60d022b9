const PAGE_SIZE = 20, MAX_TICKS = 160;

function entryOf(entry) {
  return Array.isArray(entry) ? { step: entry[0], passed: Boolean(entry[1]), gap: entry[2] } : entry;
}
// One tick per proof, or per stretch of them; a stretch with one that failed is red.
function strip(group) {
  const entries = group.entries.map(entryOf), num = Math.min(entries.length, MAX_TICKS);
  const ticks = Array.from({ length: num }, (_, at) => {
    const part = entries.slice(Math.floor(at * entries.length / num), Math.floor((at + 1) * entries.length / num));
    const failed = part.filter(entry => !entry.passed).length, [first, last] = [part[0], part[part.length - 1]];
    const where = first.rank !== undefined ? `rank ${first.rank}` : first.step === last.step ? `step ${first.step}` : `steps ${first.step} to ${last.step}`;
    const gap = part.length === 1 && Number.isFinite(first.gap) ? `, canary gap ${format(first.gap)}` : "";
    const ranks = num <= 8 && first.rank !== undefined;
    return make(ranks ? "b" : "i", { class: failed ? "bad" : "good", title: `${where}: ${failed ? `${failed} failed` : "passed"}${gap}` }, ranks ? where : null);
  });
  return make("span", { class: num > 100 ? "strip many" : "strip", role: "img", "aria-label": `${group.num - group.failed} of ${group.num} passed` }, ticks);
}
function groupTitle(group) {
  return group.role ? `${group.title} · ${group.role}` : group.title;
}
function groupFacts(group) {
  const facts = [];
  if (group.ranks > 1) facts.push(plural(group.ranks, "rank"));
  if (group.proof === "sync" || group.proof === "checkpoint" || group.num > Math.max(1, group.ranks)) facts.push(plural(group.num, { sync: "sync", checkpoint: "checkpoint", export: "export", load: "receipt", tokens: "step" }[group.proof] || "proof"));
  if (Number.isFinite(group.worst_gap)) facts.push(`worst canary gap ${format(group.worst_gap)}` + (Number.isFinite(group.tolerance) ? `, allowed ${format(group.tolerance)}` : ""));
  if (group.last !== null && group.last !== undefined) facts.push(group.num > Math.max(1, group.ranks) ? `last at step ${group.last}` : `step ${group.last}`);
  return facts.join(" · ");
}
function receipt(entry, key) {
  if (!entry.text && !entry.details && !entry.findings) return make("span", { class: "dim" }, "only in events.jsonl");
  const first = (entry.findings || [])[0] || entry.text || "details";
  return details(key, { class: "receipt" }, [make("span", { class: "first" }, first.split("\n")[0].slice(0, 160)), make("span", { class: "opened" }, "receipt")], () => [
    (entry.findings || []).map(text => make("div", { class: "text bad" }, text)),
    entry.text ? make("div", { class: entry.passed ? "text" : "text bad" }, entry.text) : null,
    entry.details ? make("dl", { class: "fields" }, entry.details.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])) : null,
  ].filter(Boolean), !entry.passed);
}
// The table of a group, a page at a time; with many proofs, those that failed can be seen alone.
function entryTable(group, key) {
  const box = make("div", { class: "entries" });
  const all = group.entries.map(entryOf);
  const render = () => {
    const rows = state.failedOnly.has(key) ? all.filter(entry => !entry.passed) : all;
    const num = Math.max(1, Math.ceil(rows.length / PAGE_SIZE)), at = Math.min(state.pages.get(key) || 0, num - 1);
    const has = name => all.some(entry => entry[name] !== undefined && entry[name] !== null);
    const columns = [["Step", entry => String(entry.step ?? "-")], has("rank") && ["Rank", entry => String(entry.rank ?? "-")],
      ["Result", entry => badge(entry.passed, entry.passed ? "passed" : "failed")],
      has("gap") && [`Canary gap${Number.isFinite(group.tolerance) ? ` (allowed ${format(group.tolerance)})` : ""}`, entry => Number.isFinite(entry.gap) ? format(entry.gap) : "-"],
      has("seconds") && ["Time", entry => Number.isFinite(entry.seconds) ? duration(entry.seconds) : "-"],
      ["Receipt", entry => receipt(entry, `${key}/${entry.step}/${entry.rank}/${all.indexOf(entry)}`)]].filter(Boolean);
    const turn = (to, text, name) => make("button", { type: "button", disabled: to < 0 || to >= num, "aria-label": name, onclick: () => { state.pages.set(key, to); render(); } }, text);
    box.replaceChildren(...[
      group.left_out ? make("p", { class: "note" }, `The first ${group.left_out.toLocaleString("en")} are only in events.jsonl.`) : null,
      table({ "data-proof": group.proof }, columns.map(column => column[0]), rows.slice(at * PAGE_SIZE, (at + 1) * PAGE_SIZE).map(entry => columns.map(column => column[1](entry)))),
      make("div", { class: "pager" },
        num > 1 ? [turn(0, "«", "first page"), turn(at - 1, "‹", "previous page"), make("span", {}, `page ${at + 1} of ${num}`), turn(at + 1, "›", "next page"), turn(num - 1, "»", "last page")] : null,
        group.failed && group.failed < all.length ? make("label", {}, make("input", { type: "checkbox", checked: state.failedOnly.has(key), onchange: event => {
          state.failedOnly[event.target.checked ? "add" : "delete"](key);
          render();
        } }), "failed only") : null),
    ].filter(Boolean));
  };
  if (group.failed && !state.pages.has(key)) state.pages.set(key, Math.floor(all.findIndex(entry => !entry.passed) / PAGE_SIZE));
  render();
  return box;
}
function proofRow(group, run) {
  const key = `proof/${run}/${group.proof}/${group.role}`;
  const verdict = group.failed ? badge(false, `${group.failed} failed`) : badge(true, group.num > 1 ? `all ${group.num.toLocaleString("en")} passed` : "passed");
  return details(key, { class: `proof ${group.failed ? "bad" : "good"}`, "data-group": groupTitle(group) }, [
    make("span", { class: "what" }, make("b", {}, groupTitle(group)), make("span", { class: "dim" }, groupFacts(group))),
    verdict, strip(group),
    group.compared ? make("span", { class: "compared" }, group.compared) : null,
  ], () => entryTable(group, key), group.failed > 0);
}
function verdictOf(ledger) {
  if (!ledger.num) return make("span", { class: "badge" }, "no proofs recorded yet");
  return ledger.failed ? badge(false, `${ledger.failed.toLocaleString("en")} of ${plural(ledger.num, "proof")} failed`) : badge(true, `${plural(ledger.num, "proof")}, all passed`);
}
function ledgerSection(run) {
  const { ledger } = run;
  const node = section("ledger", "Proof ledger", ledger.groups.length
    ? ledger.groups.map(group => proofRow(group, run.header.name))
    : make("p", { class: "none" }, "Each load, weight sync, checkpoint and export appears here once it has been checked."));
  node.querySelector("h2").append(" ", verdictOf(ledger));
  return node;
}
