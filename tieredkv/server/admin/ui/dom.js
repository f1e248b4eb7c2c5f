// Builds elements. Everything that comes from outside becomes a text node or an attribute value, never markup: names and
// texts of prompts are written by strangers.

/**
 * An element. `attributes`: strings and numbers are set as they are, true sets an empty attribute, false, null and
 * undefined set none, a function under "onclick" and the like becomes a listener. Children: nodes, strings, lists of them.
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  append(made, children);
  return made;
}

function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : String(child));
  }
}

/** Replace what `parent` holds. */
export function fill(parent, ...children) {
  parent.replaceChildren();
  append(parent, children);
}

/** Set text only where it differs, so that a selection or a screen reader's place survives an update. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function byId(id) {
  return document.getElementById(id);
}

/** A pair of a description list. */
export function fact(term, ...value) {
  return element("div", {}, element("dt", {}, term), element("dd", {}, ...value));
}

/** A table: `columns` are header texts (a leading ">" aligns right), `rows` lists of cells. */
export function table(caption, columns, rows) {
  const right = columns.map((column) => column.startsWith(">"));
  const header = columns.map((column, i) =>
    element("th", { scope: "col", class: right[i] ? "number" : null }, column.replace(/^>/, "")),
  );
  const body = rows.map((cells) =>
    element(
      "tr",
      {},
      cells.map((cell, i) =>
        i === 0
          ? element("th", { scope: "row", class: right[i] ? "number" : null }, cell)
          : element("td", { class: right[i] ? "number" : null }, cell),
      ),
    ),
  );
  return element(
    "table",
    {},
    element("caption", { class: "hidden" }, caption),
    element("thead", {}, element("tr", {}, header)),
    element("tbody", {}, body),
  );
}
