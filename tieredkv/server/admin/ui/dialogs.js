// Questions to the person at the page, and news for them. Knows no server.

import { byId, element, fill, setText } from "./dom.js";
import { explain } from "./api.js";

let numDialogs = 0;

/** A labelled control. */
export function field(label, control, hint = null) {
  return element("label", { class: "field" }, element("span", {}, label), control, hint && element("small", {}, hint));
}

export function choice(name, options, chosen = "") {
  return element(
    "select",
    { name },
    options.map(([value, text]) => element("option", { value, selected: value === chosen }, text)),
  );
}

/** Where news are seen and heard: all that lies outside the innermost open dialog is inert. */
function noticePlace(closing = null) {
  return [...document.querySelectorAll("dialog[open]")].filter((dialog) => dialog !== closing).at(-1) ?? document.body;
}

/** An empty dialog with a title; it leaves the document when it closes, and the focus returns to where it was. */
export function openDialog(title, ...content) {
  numDialogs += 1;
  const id = `dialog-${numDialogs}`;
  const dialog = element("dialog", { "aria-labelledby": id }, element("h2", { id }, title), ...content);
  dialog.addEventListener("close", () => {
    noticePlace(dialog).append(byId("notice"));
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/**
 * Ask before something is done. `submit(values)` does it when the person agrees; while it fails, the dialog stays open and
 * says why. Resolves to whether it was done.
 */
export function ask({ title, content = [], confirm, danger = false, submit }) {
  return new Promise((resolve) => {
    let done = false;
    const problem = element("p", { class: "problem", role: "alert" });
    const cancel = element("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
    const accept = element("button", { type: "submit", class: danger ? "danger" : "primary" }, confirm);
    const form = element("form", {}, ...content, problem, element("div", { class: "buttons" }, cancel, accept));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      accept.disabled = true;
      setText(problem, "");
      try {
        await submit(Object.fromEntries(new FormData(form)), new FormData(form));
        done = true;
        dialog.close();
      } catch (error) {
        setText(problem, explain(error));
        accept.disabled = false;
      }
    });
    const dialog = openDialog(title, form);
    if (danger) cancel.focus();
    dialog.addEventListener("close", () => resolve(done));
  });
}

/** Tell what happened; read out politely, and shown until the next news or until it is put away. */
export function tell(text, tone = "good") {
  const notice = byId("notice");
  if (notice.parentNode !== noticePlace()) noticePlace().append(notice);
  notice.className = tone;
  fill(
    notice,
    element("p", {}, text),
    element("button", { type: "button", class: "plain", "aria-label": "Dismiss", onclick: () => fill(notice) }, "×"),
  );
}
