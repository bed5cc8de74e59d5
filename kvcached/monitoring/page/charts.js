// Figures over time: lines, or areas on top of each other. A legend has the latest values, or those under the pointer.

import { drawn, element, setText } from "./dom.js";

export const WIDTH = 600;
export const HEIGHT = 140;
const SHORTEST_S = 60;
/** A longer time without an answer is a gap. */
const GAP_S = 6;

export class Chart {
  /**
   * `series` are `{name, className}`, or what makes them from the latest report; `values(history)` is a list of
   * `[time, value]` for each; `format` writes a value; `top` is the highest value, if that is known; else the scale
   * ends at a round number of powers of `unit`.
   */
  constructor(title, { series, values, format, top = null, unit = 1000, isStacked = false }) {
    Object.assign(this, { title, series, values, format, top, unit, isStacked });
    this.svg = emptyDrawing();
    this.legend = element("p", "legend");
    this.highest = element("span", "top");
    this.span = element("span");
    const plot = element("div", "plot", [this.svg, this.highest]);
    const caption = element("figcaption", "", [element("h2", "", title), this.legend]);
    this.panel = element("figure", "panel chart", [caption, plot, element("p", "times", [this.span, element("span", "", "now")])]);
    this.pointed = null;
    plot.addEventListener("pointermove", (event) => this.#point(event, plot));
    plot.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.#tell();
    });
  }

  draw(history) {
    this.names = typeof this.series === "function" ? this.series(history.latest.report) : this.series;
    this.lines = this.values(history);
    this.endS = history.latest.atS;
    this.startS = Math.min(history.samples[0].atS, this.endS - SHORTEST_S);
    const levels = this.isStacked ? stacked(this.lines) : this.lines;
    const known = levels.flat().map(([, value]) => value ?? 0);
    this.scale = this.top ?? nextRound(Math.max(...known, 0), this.unit);
    const parts = levels.map((line, place) => this.#path(line, levels[place - 1], this.names[place].className));
    this.cursor = drawn("line", { class: "cursor", y1: 0, y2: HEIGHT });
    this.svg.replaceChildren(...grid(), ...(this.isStacked ? parts.reverse() : parts), this.cursor);
    setText(this.highest, this.format(this.scale));
    setText(this.span, `${Math.round((this.endS - this.startS) / 60)} min ago`);
    this.#tell();
  }

  #x(atS) {
    return (WIDTH * (atS - this.startS)) / (this.endS - this.startS);
  }

  #y(value) {
    return levelOf(value / (this.scale || 1));
  }

  /** A line, or the area between it and the line below it. */
  #path(line, below, className) {
    const pieces = this.#pieces(line).map((piece) => {
      const forth = piece.map(([atS, value]) => `${this.#x(atS).toFixed(1)},${this.#y(value).toFixed(1)}`);
      if (!this.isStacked) return `M${forth.join("L")}${forth.length === 1 ? "h1" : ""}`;
      const floor = piece.map(([atS, , place]) => `${this.#x(atS).toFixed(1)},${this.#y(below?.[place][1] ?? 0).toFixed(1)}`);
      return `M${forth.join("L")}L${floor.reverse().join("L")}Z`;
    });
    return drawn("path", { d: pieces.join(""), class: `${this.isStacked ? "area" : "line"} ${className}` });
  }

  /** Values that follow each other, with their places. */
  #pieces(line) {
    const pieces = [];
    let before = -Infinity;
    line.forEach(([atS, value], place) => {
      if (value === null) return;
      if (atS - before > GAP_S) pieces.push([]);
      pieces[pieces.length - 1].push([atS, value, place]);
      before = atS;
    });
    return pieces;
  }

  #point(event, plot) {
    if (!this.lines) return;
    const box = plot.getBoundingClientRect();
    this.pointed = this.startS + ((event.clientX - box.left) / box.width) * (this.endS - this.startS);
    this.#tell();
  }

  /** Write the values into the legend. */
  #tell() {
    if (!this.lines) return;
    const times = (this.lines[0] ?? []).map(([atS]) => atS);
    let place = times.length - 1;
    if (this.pointed !== null) while (place > 0 && times[place - 1] >= this.pointed) place -= 1;
    const told = this.lines.map((line) => (line[place]?.[1] ?? null));
    this.cursor.setAttribute("visibility", this.pointed === null ? "hidden" : "visible");
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.#x(times[place] ?? this.endS));
    const texts = this.names.map(({ name }, number) => `${name} ${told[number] === null ? "–" : this.format(told[number])}`);
    this.svg.setAttribute("aria-label", `${this.title}: ${texts.join(", ") || "nothing yet"}`);
    this.names.forEach(({ className }, number) => {
      const entry = this.legend.children[number] ?? this.legend.appendChild(element("span", "", [element("span"), element("span")]));
      entry.firstChild.className = `key ${className}`;
      setText(entry.lastChild, texts[number]);
    });
    while (this.legend.children.length > this.names.length) this.legend.lastChild.remove();
  }
}

/** What lines are drawn in; it is as wide as its place. */
export const emptyDrawing = () => drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });

/** How far below the top a share of the scale is. */
export const levelOf = (share) => HEIGHT - (HEIGHT - 2) * Math.min(share, 1);

export function grid() {
  return [0.25, 0.5, 0.75].map((share) =>
    drawn("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share }),
  );
}

/** Each line on top of those before it. */
function stacked(lines) {
  const floor = [];
  return lines.map((line) =>
    line.map(([atS, value], place) => {
      floor[place] = (floor[place] ?? 0) + (value ?? 0);
      return [atS, value === null ? null : floor[place]];
    }),
  );
}

/** The next round number that is not lower: 1, 2, 3, … 8 or 10, by a power of ten and one of the unit. */
function nextRound(value, unit) {
  if (value <= 0) return 1;
  const units = unit ** Math.floor(Math.log(value) / Math.log(unit));
  const power = units * 10 ** Math.floor(Math.log10(value / units));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999) ?? 10 * power;
}
