// The form that asks what a prompt would find in the cache now.

import { Refused, explain, post } from "./api.js";
import { askToPinPrompt, askToWarm } from "./actions.js";
import { byId, element, fact, fill, setText } from "./dom.js";
import { count, counted, duration } from "./format.js";

const LABELS = { device: "device", host: "host", disk: "disk", computing: "being computed", missing: "to be computed" };
const TONES = { device: "device", host: "host", disk: "disk", computing: "computed", missing: "none" };

/** The prompt in the form as the body of a request. Throws `Refused` for what cannot be one. */
function source(values) {
  const body = {};
  for (const name of ["cache_salt", "tenant"]) if (values[name]) body[name] = values[name];
  if (values.kind === "prompt") return { ...body, prompt: values.text };
  let parsed;
  try {
    parsed = JSON.parse(values.text);
  } catch (error) {
    throw new Refused(`This is not JSON: ${error.message}`, 400, null);
  }
  return { ...body, [values.kind]: parsed };
}

function spanBar(report) {
  const spans = report.spans.map((span) => {
    const part = element("span", {
      class: `span tone-${TONES[span.where] ?? "none"}`,
      title: `${count(span.start)} to ${count(span.end)}: ${LABELS[span.where] ?? span.where}`,
    });
    part.style.flexGrow = span.end - span.start;
    return part;
  });
  const text = report.spans
    .map((span) => `tokens ${span.start} to ${span.end} ${LABELS[span.where] ?? span.where}`)
    .join(", ");
  return element("div", { class: "spans", role: "img", "aria-label": text }, spans);
}

export class Lookup {
  /** `tiers()` are the tiers' reports; `act(done)` waits for a dialog and refreshes the page. */
  constructor({ tiers, act }) {
    const form = byId("lookup");
    const hint = byId("lookup-hint");
    const hints = {
      prompt: "The text as a completion request would send it.",
      messages: 'A chat as JSON: [{"role": "user", "content": "…"}]',
      tokens: "Token ids as JSON: [1, 2, 3]",
    };
    form.elements.kind.addEventListener("change", () => setText(hint, hints[form.elements.kind.value]));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const result = byId("lookup-result");
      try {
        const asked = source(Object.fromEntries(new FormData(form)));
        const report = await post("admin/cache/lookup", asked);
        fill(result, this._describe(report), this._buttons(asked, tiers, act));
      } catch (error) {
        fill(result, element("p", { class: "problem", role: "alert" }, explain(error)));
      }
    });
  }

  _describe(report) {
    const places = ["device", "host", "disk"].map((tier) => [tier, report[`${tier}_tokens`]]);
    const legend = [...places, ["missing", report.computed_tokens]].map(([where, num]) =>
      element(
        "li",
        {},
        element("span", { class: `swatch tone-${TONES[where]}` }),
        LABELS[where],
        element("span", { class: "value" }, counted(num, "token")),
      ),
    );
    return [
      spanBar(report),
      element("ul", { class: "legend" }, legend),
      element(
        "dl",
        { class: "facts" },
        fact("Prompt", `${counted(report.num_tokens, "token")}, ${counted(report.num_blocks, "full block")}`),
        fact("Restoring takes", duration(report.restore_seconds)),
        fact("Computing the rest takes", duration(report.compute_seconds)),
        fact("The cache saves", duration(report.saved_seconds)),
      ),
    ];
  }

  _buttons(asked, tiers, act) {
    return element(
      "div",
      { class: "buttons" },
      element("button", { type: "button", onclick: () => act(askToPinPrompt(asked, tiers())) }, "Pin this prompt…"),
      element("button", { type: "button", onclick: () => act(askToWarm(asked)) }, "Warm it…"),
    );
  }
}
