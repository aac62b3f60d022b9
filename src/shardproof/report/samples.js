function rewardPill(value, [low, high]) {
  const share = Number.isFinite(value) && high > low ? (value - low) / (high - low) : 0.5;
  const tone = share >= 0.99 && high > low ? "good" : share <= 0.01 && high > low ? "bad" : "middle";
  return make("span", { class: `reward ${tone}` }, value === null ? "failed" : format(value));
}
function completion(sample, bounds, step) {
  return make("li", { class: "completion" },
    make("div", { class: "scores" }, rewardPill(sample.reward, bounds),
      sample.advantage !== null ? make("small", { title: "how much better than its group this completion counts" }, `advantage ${sample.advantage > 0 ? "+" : ""}${format(sample.advantage)}`) : null,
      sample.parts.length > 1 || (sample.parts.length && sample.parts[0][1] !== sample.reward) ? sample.parts.map(([name, value]) => make("small", {}, `${name} ${format(value)}`)) : null),
    make("div", { class: "text" }, sample.completion || sample.pieces ? drawnText(sample.completion, sample.pieces) : make("span", { class: "dim" }, "(empty)")),
    originBox(sample, step));
}
function groupCard(group, bounds, step) {
  const num = group.samples.length, size = Math.max(group.whole || num, group.rewards.length);
  const known = group.rewards.filter(value => value !== null);
  const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  const isTalk = group.samples.some(sample => sample.segments), word = isTalk ? "conversation" : "completion";
  return make("article", { class: isTalk ? "card sample-group talks" : "card sample-group" },
    make("h4", {}, "Prompt"), make("div", { class: "text" }, marked(group.prompt, "prompt")),
    group.answer !== null ? [make("h4", {}, "Expected answer"), make("div", { class: "text answer" }, group.answer)] : null,
    make("h4", {}, num < size ? `${num} of ${plural(size, word)}` : plural(num, word)),
    group.rewards.length > 1 ? make("p", { class: "group-rewards" }, make("small", {}, `rewards of the group (mean ${format(mean)}): `), group.rewards.map(value => rewardPill(value, bounds))) : null,
    make("ol", {}, group.samples.map((sample, at) => sample.segments ? conversation(sample, group.prompt, bounds, `talk/${step.step}/${group.prompt}/${sample.place}`, at === 0, step) : completion(sample, bounds, step))));
}
const stepCards = (step, bounds) => step.groups.map(group => groupCard(group, bounds, step));

function samplesSection(run) {
  const { samples } = run;
  if (!samples.steps.length) return section("samples", "Samples", make("p", { class: "none" }, "No samples were recorded."));
  const bounds = extent(samples.steps.map(step => step.groups.flatMap(group => group.samples.map(sample => sample.reward)))) || [0, 1];
  const body = make("div", { id: "sample-body" });
  let steps = [], at = 0;
  const slider = make("input", { type: "range", id: "sample-step", min: "0", "aria-label": "step of the samples", oninput: () => go(Number(slider.value)) });
  const where = make("output", { for: "sample-step" });
  const before = make("button", { type: "button", "aria-label": "previous step", onclick: () => go(at - 1) }, "‹");
  const after = make("button", { type: "button", "aria-label": "next step", onclick: () => go(at + 1) }, "›");
  const byStep = make("span", { class: "by-step" }, before, slider, after, where);
  const view = (value, text) => make("label", {}, make("input", { type: "radio", name: "sample-view", value, checked: state.sampleView === value, onchange: () => { state.sampleView = value; render(); } }), text);
  const [filters, found] = sampleFilters(samples, choose);
  function go(to) {
    at = Math.min(Math.max(to, 0), steps.length - 1);
    state.sampleStep = at === steps.length - 1 ? null : steps[at].step;  // at the end, a live page stays at the newest
    render();
  }
  // The steps with samples that the filter lets through; the slider has only these.
  function choose() {
    steps = filteredSteps(samples.steps);
    const place = steps.findIndex(step => step.step === state.sampleStep);
    at = place < 0 ? steps.length - 1 : place;
    found.textContent = filterIsOn() ? `${plural(numSamples(steps), "sample")} in ${plural(steps.length, "step")}` : "";
    render();
  }
  function render() {
    byStep.hidden = state.sampleView !== "step" || !steps.length;
    if (!steps.length) {
      body.replaceChildren(make("p", { class: "none" }, "No sample matches."));
      return;
    }
    const words = `step ${steps[at].step}`;
    slider.max = String(steps.length - 1);
    slider.value = String(at);
    slider.setAttribute("aria-valuetext", words);
    where.textContent = words;
    [before.disabled, after.disabled] = [at === 0, at === steps.length - 1];
    const column = step => make("div", { class: "column" }, make("h3", {}, `Step ${step.step}`), stepCards(step, bounds));
    body.replaceChildren(...(state.sampleView === "step" ? [make("div", { class: "cards" }, stepCards(steps[at], bounds))]
      : [make("div", { class: "columns" }, column(steps[0]), column(steps[steps.length - 1]))]));
  }
  choose();
  const left = samples.num_steps > samples.steps.length ? make("p", { class: "note" }, `The page has ${samples.steps.length} of ${samples.num_steps.toLocaleString("en")} steps with samples; samples.jsonl has them all.`) : null;
  return section("samples", "Samples", make("div", { class: "bar", role: "group", "aria-label": "which samples" }, view("step", "by step"), view("ends", "first against last"), byStep), filters, body, left);
}
