// Elements and their text. Whatever the daemon says comes in as text: nothing here, or elsewhere, makes HTML of it.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** A new element with a class, a text, or children. */
export function element(tag, className = "", content = null) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (Array.isArray(content)) made.append(...content);
  else if (content !== null) made.textContent = content;
  return made;
}

/** A new element of a drawing. */
export function drawn(tag, attributes = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Set a text where it is another one: what a reader has selected stays selected. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A row of shares of a whole, each as `[class, share]`. */
export function fillBar(bar, shares) {
  while (bar.children.length < shares.length) bar.append(element("span"));
  while (bar.children.length > shares.length) bar.lastChild.remove();
  shares.forEach(([className, share], place) => {
    bar.children[place].className = className;
    bar.children[place].style.width = `${100 * share}%`;
  });
}

/**
 * Show rows in a table whose columns are `[title, isFigure]`. A cell is a text, or shares of a bar.
 * Rows and cells stay where they are; only their contents change.
 */
export function fillTable(table, columns, rows, whenEmpty) {
  if (!table.tHead) table.append(element("thead", "", [element("tr")]), element("tbody"));
  const heads = table.tHead.rows[0];
  while (heads.cells.length > columns.length) heads.lastChild.remove();
  columns.forEach(([title, isFigure], place) => {
    const head = heads.cells[place] ?? heads.appendChild(element("th", isFigure ? "number" : ""));
    head.scope = "col";
    setText(head, title);
  });
  const body = table.tBodies[0];
  const shown = rows.length ? rows : [[whenEmpty]];
  while (body.rows.length > shown.length) body.lastChild.remove();
  shown.forEach((cells, number) => {
    const row = body.rows[number] ?? body.appendChild(element("tr"));
    while (row.cells.length > cells.length) row.lastChild.remove();
    cells.forEach((cell, place) => {
      const found = row.cells[place] ?? row.appendChild(element("td", columns[place][1] ? "number" : ""));
      found.colSpan = rows.length ? 1 : columns.length;
      if (Array.isArray(cell)) {
        if (!found.firstElementChild) found.replaceChildren(element("div", "bar"));
        fillBar(found.firstElementChild, cell);
      } else setText(found, cell);
    });
  });
}
