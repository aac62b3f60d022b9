const AUTHORS = { prompt: "prompt", policy: "policy", environment: "environment", template: "chat template" };
const ENDINGS = { done: "the environment ended it", turns: "ended by the limit of turns", tokens: "ended by the limit of tokens", length: "a turn was cut at its limit of tokens", time: "ended by the limit of time", failed: "the environment failed" };

// Text with what is searched for set off, where the search looks at this author.
function marked(text, author) {
  const { text: wanted, author: only } = state.sampleFilter, needle = wanted.trim().toLowerCase();
  if (!needle || (only && only !== author)) return text;
  const parts = [], lower = text.toLowerCase();
  if (lower.length !== text.length) return text;  // a letter whose lower case is longer: the places would not fit
  let from = 0;
  for (let at = lower.indexOf(needle); at >= 0; at = lower.indexOf(needle, from)) {
    parts.push(text.slice(from, at), make("mark", {}, text.slice(at, at + needle.length)));
    from = at + needle.length;
  }
  return [...parts, text.slice(from)];
}
const signed = value => `${value > 0 ? "+" : ""}${format(value)}`;
const numFailed = sample => (sample.segments || []).reduce((sum, segment) => sum + (segment.malformed || []).length + (segment.calls || []).filter(call => call.failed).length, 0);

function callBox(call) {
  return make("div", { class: call.failed ? "call bad" : "call" },
    make("div", {}, make("b", {}, "call "), make("code", {}, make("b", {}, marked(call.name, "policy")), " ", marked(call.arguments, "policy"))),
    call.answer !== undefined && call.answer !== null ? make("div", { class: "text" }, make("b", {}, call.failed ? "failed " : "answer "), marked(call.answer, "environment")) : null);
}
// "4, 5": the versions of the weights that drew something, in order.
const versionList = parts => [...new Set(parts.filter(Number.isFinite))].join(", ");
const versionWords = parts => { const list = versionList(parts); return list ? `weights version${list.includes(",") ? "s" : ""} ${list}` : null; };
// A turn's text. Where the weights changed while it was drawn, each part has its version, as a label and on hover.
function drawnText(text, pieces) {
  if (!pieces) return marked(text, "policy");
  let from = 1;
  return pieces.map((piece, index) => {
    const to = from + (piece.tokens || 1) - 1, title = `tokens ${from} to ${to}: weights version ${piece.version}`;
    from = to + 1;
    return make("span", { class: `piece s${[0, 3, 2, 5, 6, 4][index % 6]}`, title }, make("small", { class: "version" }, `v${piece.version}`), marked(piece.text, "policy"));
  });
}
// Where a sample came from, in runs that say so: the weights, how old they were, the engine, and the step that it was drawn for.
function origin(sample, step) {
  const drawn = (sample.versions || []).map(part => part[1]).filter(Number.isFinite);
  if (!drawn.length && !sample.replica) return [];
  const ages = Number.isFinite(step.version) ? drawn.map(version => step.version - version) : [], [low, high] = extent([ages]) || [0, 0];
  const age = !ages.length ? null : high === 0 ? "up to date" : `${low === high ? high : `${low} to ${high}`} update${high === 1 ? "" : "s"} old`;
  return [versionWords(drawn), age, sample.replica ? `replica ${sample.replica}` : null, sample.drawn_for && sample.drawn_for !== step.step ? `drawn for step ${sample.drawn_for}` : null].filter(Boolean);
}
const originBox = (sample, step) => { const words = origin(sample, step); return words.length ? make("small", { class: "origin", title: "which weights and which engine drew it" }, words.join(" · ")) : null; };
function turnBox(segment) {
  const facts = [plural(segment.tokens || 0, "token"), segment.pieces ? versionWords(segment.pieces.map(piece => piece.version)) : versionWords([segment.version]),
    Number.isFinite(segment.advantage) ? `advantage ${signed(segment.advantage)}` : null].filter(Boolean);
  return make("div", { class: segment.trained ? "part policy trained" : "part policy" },
    make("div", { class: "by" }, make("b", {}, segment.turn ? `policy, turn ${segment.turn}` : "policy"), make("small", {}, facts.join(" · ")),
      segment.trained ? null : make("span", { class: "badge" }, "not trained"),
      segment.reward ? make("span", { class: `reward ${segment.reward > 0 ? "good" : "bad"}`, title: "the environment's reward for this turn" }, `reward ${signed(segment.reward)}`) : null),
    make("div", { class: "text" }, drawnText(segment.text, segment.pieces)),
    (segment.calls || []).map(callBox),
    (segment.malformed || []).map(why => make("div", { class: "call bad" }, make("b", {}, "malformed call "), why)));
}
// What others wrote between two turns, in one box: the chat template's tokens stand around the environment's.
function readBox(segments, above) {
  const author = segments.some(each => each.author === "environment") ? "environment" : segments[0].author;
  const tokens = segments.reduce((sum, each) => sum + (each.tokens || 0), 0);
  const template = author === "template" ? 0 : segments.reduce((sum, each) => sum + (each.author === "template" ? each.tokens || 0 : 0), 0);
  const isAbove = author === "prompt" && segments[0].text === above;
  const name = Object.hasOwn(AUTHORS, author) ? author : "other";
  return make("div", { class: `part ${name}` },
    make("div", { class: "by" }, make("b", {}, AUTHORS[author] || author || "unknown"), make("small", {}, plural(tokens, "token") + (template ? `, ${template} of the template` : "") + (isAbove ? ", as shown above" : ""))),
    isAbove ? null : make("div", { class: "text" }, segments.map(each => make("span", { class: `by-${Object.hasOwn(AUTHORS, each.author) ? each.author : "other"}` }, marked(each.text, each.author)))));
}
function boxes(segments, above) {
  const found = [];
  let others = [], sequence;
  const flush = () => { if (others.length) found.push(readBox(others)); others = []; };
  for (const segment of segments) {
    if (segment.sequence !== undefined && segment.sequence !== sequence) {
      flush();
      if (segment.sequence > 1) found.push(make("p", { class: "cut" }, `sequence ${segment.sequence}: from here on the policy read this in place of what stands above`));
      sequence = segment.sequence;
    }
    if (segment.author === "policy") { flush(); found.push(turnBox(segment)); }
    else if (segment.author === "prompt") { flush(); found.push(readBox([segment], above)); }
    else others.push(segment);
  }
  flush();
  return found;
}
function conversation(sample, prompt, bounds, key, openAtFirst, step) {
  const turns = sample.segments.filter(segment => segment.author === "policy"), failed = numFailed(sample);
  const calls = turns.reduce((sum, turn) => sum + (turn.calls || []).length, 0);
  const facts = [plural(turns.length, "turn"), calls ? plural(calls, "call") : null, sample.advantage !== null ? `advantage ${signed(sample.advantage)}` : null,
    ...(sample.parts.length > 1 || (sample.parts.length && sample.parts[0][1] !== sample.reward) ? sample.parts.map(([name, value]) => `${name} ${format(value)}`) : [])].filter(Boolean);
  const summary = [rewardPill(sample.reward, bounds), make("span", { class: sample.ended === "done" || !sample.ended ? "badge" : sample.ended === "failed" ? "badge bad" : "badge warn", title: ENDINGS[sample.ended] }, sample.ended || "no ending"),
    failed ? make("span", { class: "badge bad" }, plural(failed, "failed call")) : null, make("small", {}, facts.join(" · ")), originBox(sample, step)];
  return make("li", { class: "conversation" }, details(key, {}, summary, () => [
    sample.error ? make("div", { class: "text bad" }, sample.error) : null, boxes(sample.segments, prompt),
    make("p", { class: "cut" }, `${sample.left_out ? `${sample.left_out} more segments are only in samples.jsonl. ` : ""}End: ${ENDINGS[sample.ended] || sample.ended || "not recorded"}.`),
  ].flat().filter(Boolean), openAtFirst || Boolean(state.sampleFilter.text.trim())));
}

// Filters of the samples. Those about conversations are there if the run has any.
const filterIsOn = () => Object.values(state.sampleFilter).some(value => typeof value === "string" ? value.trim() : value);
const numSamples = steps => steps.reduce((sum, step) => sum + step.groups.reduce((part, group) => part + group.samples.length, 0), 0);
function textsOf(group, sample, author) {
  const all = [["prompt", group.prompt], ["policy", sample.completion]];
  for (const segment of sample.segments || []) {
    all.push([segment.author, segment.text]);
    for (const call of segment.calls || []) all.push(["policy", `${call.name} ${call.arguments}`], ["environment", call.answer || ""]);
  }
  return all.filter(([by]) => !author || by === author).map(([, text]) => text.toLowerCase());
}
function matches(group, sample) {
  const filter = state.sampleFilter, needle = filter.text.trim().toLowerCase(), sign = Math.sign(sample.reward);
  if (filter.ended && sample.ended !== filter.ended) return false;
  if (filter.reward && (sample.reward === null || String(sign) !== filter.reward)) return false;
  if (filter.failed && !numFailed(sample)) return false;
  return !needle || textsOf(group, sample, filter.author).some(text => text.includes(needle));
}
function filteredSteps(steps) {
  const numbered = group => group.samples.map((sample, place) => ({ ...sample, place }));
  const kept = step => step.groups.map(group => ({ ...group, whole: group.samples.length, samples: numbered(group).filter(sample => matches(group, sample)) })).filter(group => group.samples.length);
  return steps.map(step => ({ ...step, groups: kept(step) })).filter(step => step.groups.length);
}
function sampleFilters(samples, changed) {
  const every = samples.steps.flatMap(step => step.groups.flatMap(group => group.samples)), talks = every.filter(sample => sample.segments);
  const filter = state.sampleFilter, found = make("output", { id: "samples-found", "aria-live": "polite" });
  const set = (key, value) => { filter[key] = value; changed(); };
  const choice = (key, label, options) => make("label", {}, make("span", {}, label), make("select", { id: `filter-${key}`, onchange: event => set(key, event.target.value) },
    options.map(([value, text]) => make("option", { value, selected: filter[key] === value }, text))));
  const endings = [...new Set(talks.map(sample => sample.ended).filter(Boolean))].sort();
  const bar = make("div", { class: "bar filters", role: "search", "aria-label": "filter the samples" },
    make("label", { class: "grow" }, make("input", { type: "search", id: "filter-text", placeholder: "search the samples", "aria-label": "search the samples", value: filter.text, oninput: event => set("text", event.target.value) })),
    talks.length ? choice("author", "in", [["", "all text"], ...Object.entries(AUTHORS)]) : null,
    choice("reward", "reward", [["", "any"], ["1", "above 0"], ["0", "0"], ["-1", "below 0"]]),
    talks.length ? [choice("ended", "ended", [["", "any"], ...endings.map(value => [value, value])]),
      make("label", {}, make("input", { type: "checkbox", id: "filter-failed", checked: filter.failed, onchange: event => set("failed", event.target.checked) }), "failed calls")] : null, found);
  const legend = talks.length ? make("p", { class: "writers" }, "Written by ", ["prompt", "policy", "environment", "template"].map(name => make("span", { class: `writer ${name}` }, AUTHORS[name])), make("span", { class: "untrained" }, "grey text: read, but not trained on")) : null;
  return [[bar, legend], found];
}
