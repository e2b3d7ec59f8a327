"use strict";
/* The page's script: draws figures when they come into view, in the colours of the screen, and fills the panels of the
   program that is shown from its data (`program_view.py`). Nothing is loaded. */

const find = (selector, root = document) => root.querySelector(selector);
const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

/** An element with attributes (`text` is its text, `on*` are handlers) and children. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Three figures of a number with one of the prefixes, as autoshard prints it. */
function withPrefix(value, unit, prefixes) {
  for (const [prefix, size] of prefixes) if (value >= size) return `${threeFigures(value / size)} ${prefix}${unit}`;
  return value ? `${threeFigures(value)} ${unit}` : `0 ${unit}`;
}
const threeFigures = (value) => String(Number(value.toPrecision(3)));
const bytes = (value) => withPrefix(value, "B", [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]);
function seconds(value) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) if (value >= size) return `${threeFigures(value / size)} ${unit}`;
  return value ? `${threeFigures(value / 1e-9)} ns` : "0";
}

/* ---- figures ---- */

const documents = new Map();  // of Bokeh, by the name of the figure

function colour(variable) {
  const probe = make("span", {style: `color: var(${variable})`});
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Gives a figure the colours of the screen. */
function paint(drawn) {
  const [text, soft, faint] = ["--text", "--soft", "--faint"].map(colour);
  for (const model of drawn._all_models.values()) {
    if (model.type.endsWith("Axis")) {
      model.axis_label_text_color = text;
      model.major_label_text_color = text;
      model.axis_line_color = soft;
      model.major_tick_line_color = soft;
      model.minor_tick_line_color = null;
    } else if (model.type === "Grid") {
      model.grid_line_color = faint;
    } else if (model.type === "Span" && model.name === "cursor") {
      model.line_color = text;
    }
  }
}

async function draw(place) {
  const name = place.dataset.figure;
  if (documents.has(name)) return documents.get(name);
  documents.set(name, (async () => {
    const item = JSON.parse(find(`#figure-${CSS.escape(name)}`).textContent);
    const [view] = await Bokeh.embed.embed_item(item, place);
    const drawn = view.model.document;
    place.style.minHeight = "";
    paint(drawn);
    return drawn;
  })());
  return documents.get(name);
}

const visible = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    visible.unobserve(entry.target);
    if (entry.target.dataset.figure === "step") stepPanel.draw();
    else draw(entry.target);
  }
}, {rootMargin: "400px"});

/* ---- a step over time ---- */

const COLUMNS = 1200;
const LANES = {product: 0, other: 1, waited: 2, hidden: 3};
const MOST_ALIVE = 18;

class StepPanel {
  constructor() {
    this.at = find("#at");
    this.slider = find("#cursor");
    this.isHeld = false;
    this.instant = 0;
    this.chosen = -1;  // the kind of collective that stands out
    if (!this.slider) return;
    this.slider.addEventListener("input", () => { this.isHeld = true; this.toSlider(); });
    this.slider.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        event.preventDefault();
        this.isHeld = true;
        this.toNeighbour(event.key === "ArrowLeft" ? -1 : 1, event.shiftKey ? 20 : 1);
      }
    });
    const actions = {
      peak: () => this.to(this.peak()), previous: () => this.toNeighbour(-1), next: () => this.toNeighbour(1),
      in: () => this.zoom(0.4), out: () => this.zoom(2.5), all: () => this.look(0, this.end),
    };
    for (const button of findAll("[data-do]")) button.addEventListener("click", () => { this.isHeld = true; actions[button.dataset.do](); });
  }

  show(program) {
    this.program = program;
    this.end = Math.round(program.step_s / program.tick_s);
    this.sumUp();
    this.legend();
    this.chosen = -1;
    this.window = [0, this.end];
    this.isHeld = false;
    this.tallest = 0;
    if (this.models) this.fit();
    this.to(program.has_profile ? this.peak() : 0);
  }

  /** Bytes of each class at each instant. */
  sumUp() {
    const {instants, classes, held, tensors} = this.program;
    this.byClass = classes.map(() => new Float64Array(instants.length + 1));
    for (const [tensor, start, stop, size] of held) {
      const sums = this.byClass[tensors[tensor][1]];
      sums[start] += size;
      sums[stop] -= size;
    }
    this.total = new Float64Array(instants.length);
    for (const sums of this.byClass) {
      for (let i = 1; i <= instants.length; i++) sums[i] += sums[i - 1];
      for (let i = 0; i < instants.length; i++) this.total[i] += sums[i];
    }
  }

  peak() {
    let best = 0;
    for (let i = 1; i < this.total.length; i++) if (this.total[i] > this.total[best]) best = i;
    return best;
  }

  legend() {
    const {classes, colours, collectives, product_colour, kernel_colour} = this.program;
    const memory = classes.map((name, k) => [name, colours[k]]).filter((_, k) => this.byClass[k].some((size) => size > 0));
    const work = new Map([["products", product_colour], ["other kernels", kernel_colour], ...collectives.map((c) => [c[0], c[14]])]);
    for (const [place, head, entries] of [["#memory-legend", "Above:", memory], ["#work-legend", "Below:", work]]) {
      find(place).replaceChildren(make("li", {text: head}), ...[...entries].map(([name, shade]) =>
        make("li", {}, make("span", {class: "swatch", style: `background:${shade}`}), name)));
    }
  }

  async draw() {
    const drawn = await draw(find('[data-figure="step"]'));
    const model = (name) => drawn.get_model_by_name(name);
    this.drawn = drawn;
    this.models = {
      memory: model("memory"), runs: model("runs"), time: model("time"), bytes: model("bytes"), budget: model("budget"),
      cursors: [...drawn._all_models.values()].filter((m) => m.name === "cursor"),
      timeAxis: model("time axis"), bytesAxis: model("bytes axis"),
    };
    for (const name of ["memory figure", "work figure"]) {
      const figure = model(name);
      figure.on_event("mousemove", (event) => { if (!this.isHeld) this.toTime(event.x); });
      figure.on_event("tap", (event) => { this.isHeld = !this.isHeld; this.toTime(event.x); });
      drawn.event_manager.subscribed_models.add(figure);
      if (matchMedia("(pointer: coarse)").matches) figure.toolbar.active_drag = null;
    }
    this.models.time.change.connect(() => this.looked());
    this.fit();
  }

  /** Sets axes for the program. */
  fit() {
    const {time_unit, byte_unit, budget_bytes} = this.program;
    const {timeAxis, bytesAxis, bytes: range, budget, time} = this.models;
    this.toUnit = this.program.tick_s / time_unit[1];
    timeAxis.axis_label = `time [${time_unit[0]}]`;
    bytesAxis.axis_label = `memory [${byte_unit[0]}]`;
    const most = this.total.reduce((a, b) => Math.max(a, b), 0) / byte_unit[1] || 1;
    const limit = budget_bytes === null ? Infinity : budget_bytes / byte_unit[1];
    budget.visible = limit <= 3 * most;
    range.setv({start: 0, end: 1.08 * Math.max(most, budget.visible ? limit : 0)});
    budget.location = Number.isFinite(limit) ? limit : 0;
    const end = this.end * this.toUnit;
    time.setv({bounds: [0, end]});
    this.look(0, this.end);
    this.mark();
  }

  look(start, stop) {
    const width = Math.min(Math.max(stop - start, this.end / 5000), this.end);
    const from = Math.min(Math.max(start, 0), this.end - width);
    this.window = [from, from + width];
    if (!this.models) return;
    this.models.time.setv({start: from * this.toUnit, end: (from + width) * this.toUnit});
    this.fill();
  }

  /** Follows a change of the axis that the reader made. */
  looked() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = null;
      const {start, end} = this.models.time;
      const window = [start / this.toUnit, end / this.toUnit];
      if (Math.abs(window[0] - this.window[0]) + Math.abs(window[1] - this.window[1]) > 1) {
        this.window = window;
        this.fill();
      }
    });
  }

  zoom(factor) {
    const [start, stop] = this.window, now = this.now();
    const centre = now >= start && now <= stop ? now : (start + stop) / 2;
    const width = (stop - start) * factor;
    this.look(centre - width / 2, centre + width / 2);
  }

  /** Hands the figures what there is in the window, no finer than the screen. */
  fill() {
    const {instants, byte_unit} = this.program, [from, until] = this.window;
    const columns = this.byClass.length, width = (until - from) / COLUMNS;
    const edges = Array.from({length: 11}, () => []), t = [];
    let i = Math.max(upper(instants, from) - 1, 0);
    for (let k = 0; k < COLUMNS && instants.length; k++) {
      const stop = from + (k + 1) * width;
      let best = i;
      while (i + 1 < instants.length && instants[i + 1] < stop) { i += 1; if (this.total[i] > this.total[best]) best = i; }
      t.push((stop - width) * this.toUnit, stop * this.toUnit);
      let sum = 0;
      edges[0].push(0, 0);
      for (let c = 0; c < 10; c++) {
        if (c < columns) sum += this.byClass[c][best] / byte_unit[1];
        edges[c + 1].push(sum, sum);
      }
    }
    this.models.memory.data = {t, ...Object.fromEntries(edges.map((edge, k) => [`e${k}`, edge]))};
    this.fillRuns();
  }

  fillRuns() {
    const {kernel_runs, kernels, waited_runs, hidden_runs, collectives, product_colour, kernel_colour} = this.program;
    const [from, until] = this.window, gap = (until - from) / COLUMNS / 2;
    const data = {left: [], right: [], top: [], bottom: [], colour: [], alpha: []};
    const last = {};
    const add = (lane, start, stop, shade, alpha) => {
      if (stop < from || start > until) return;
      const before = last[lane];
      if (before !== undefined && data.colour[before] === shade && data.alpha[before] === alpha && start - data.right[before] < gap) {
        data.right[before] = stop;
        return;
      }
      last[lane] = data.left.length;
      data.left.push(start); data.right.push(stop); data.top.push(lane + 0.08); data.bottom.push(lane + 0.92);
      data.colour.push(shade); data.alpha.push(alpha);
    };
    const faint = this.chosen >= 0 ? 0.3 : 1;
    for (const [kind, start, stop] of kernel_runs) {
      const isProduct = kernels[kind][3];
      add(isProduct ? LANES.product : LANES.other, start, stop, isProduct ? product_colour : kernel_colour, faint);
    }
    for (const [lane, runs] of [[LANES.waited, waited_runs], [LANES.hidden, hidden_runs]]) {
      for (const [kind, start, stop] of runs) add(lane, start, stop, collectives[kind][14], kind === this.chosen ? 1 : faint);
    }
    for (const side of ["left", "right"]) data[side] = data[side].map((tick) => tick * this.toUnit);
    this.models.runs.data = data;
  }

  now() { return this.program.instants[this.instant] ?? 0; }

  /** To the instant with the most memory among those that a place on the screen stands for. */
  toTick(tick, width) {
    const {instants} = this.program;
    if (!instants.length) return;
    let i = Math.max(upper(instants, tick) - 1, 0), best = i;
    while (i + 1 < instants.length && instants[i + 1] < tick + width) { i += 1; if (this.total[i] > this.total[best]) best = i; }
    this.to(best);
  }
  toTime(x) { this.toTick(x / this.toUnit, (this.window[1] - this.window[0]) / COLUMNS); }
  toSlider() {
    const [start, stop] = this.window, width = (stop - start) / 1000;
    this.toTick(start + Number(this.slider.value) * width, width);
  }
  toNeighbour(direction, steps = 1) {
    this.to(Math.min(Math.max(this.instant + direction * steps, 0), Math.max(this.program.instants.length - 1, 0)));
  }

  to(instant) {
    this.instant = instant;
    const [start, stop] = this.window, now = this.now();
    if (now < start || now > stop) this.look(now - (stop - start) / 2, now + (stop - start) / 2);
    this.mark();
    if (!this.telling) this.telling = requestAnimationFrame(() => { this.telling = null; this.tell(); });
  }

  /** The place below does not shrink while the cursor moves, so that nothing jumps. */
  keepHeight() {
    this.tallest = Math.max(this.tallest ?? 0, this.at.offsetHeight);
    this.at.style.minHeight = `${this.tallest}px`;
  }

  mark() {
    const [start, stop] = this.window;
    this.slider.value = Math.round((this.now() - start) / (stop - start) * 1000);
    this.slider.setAttribute("aria-valuetext",
      `${seconds(this.now() * this.program.tick_s)}, ${bytes(this.total[this.instant] ?? 0)} in memory`);
    if (this.models) for (const cursor of this.models.cursors) cursor.location = this.now() * this.toUnit;
  }

  /** What runs and what is alive at the cursor. */
  tell() {
    const p = this.program, i = this.instant, now = this.now();
    if (!p.has_profile || !p.instants.length) {
      this.at.replaceChildren(make("p", {text: "This plan does not tell what happens when. Plan again to see it."}));
      return;
    }
    const lines = [];
    const kernel = running(p.kernel_runs, now);
    if (kernel) {
      const [name, source, argument] = p.kernels[kernel[0]];
      lines.push(described(`${name}, ${seconds((kernel[2] - kernel[1]) * p.tick_s)}`, argument && `for ${argument}`, p.sources[source]));
    }
    for (const [runs, what] of [[p.waited_runs, "is waited for"], [p.hidden_runs, "runs beside kernels"]]) {
      const run = running(runs, now);
      if (!run) continue;
      const [name, axes, tensor, , , , , argument, source] = p.collectives[run[0]];
      lines.push(described(`${name} over ${axes} ${what}, ${seconds((run[2] - run[1]) * p.tick_s)}`, argument || tensor, p.sources[source]));
    }
    const alive = new Map();
    for (const [tensor, start, stop, size, count] of p.held) {
      if (start > i || stop <= i) continue;
      const entry = alive.get(tensor) ?? [0, 0];
      alive.set(tensor, [entry[0] + size, entry[1] + count]);
    }
    const sorted = [...alive].sort((a, b) => b[1][0] - a[1][0]);
    const rest = sorted.slice(MOST_ALIVE);
    const shares = p.classes.map((name, k) => [name, this.byClass[k][i]]).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
    const limit = p.budget_bytes === null ? "" : ` of ${bytes(p.budget_bytes)} allowed`;
    this.at.replaceChildren(
      make("h3", {text: `At ${seconds(now * p.tick_s)}${this.total[i] === this.total[this.peak()] ? ", the peak" : ""}: ${bytes(this.total[i])}${limit}`}),
      make("p", {text: shares.map(([name, size]) => `${name} ${bytes(size)}`).join(", ")}),
      ...lines,
      make("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Tensors in memory at the cursor"}, tableOf(
        [["memory", "number"], ["n", "number"], ["class"], ["tensor"], ["shape"], ["line"]],
        sorted.slice(0, MOST_ALIVE).map(([tensor, [size, count]]) => {
          const [name, kind, shape, source] = p.tensors[tensor];
          return [[bytes(size), "number"], [String(count), "number"], [p.classes[kind]], [name, "path"], [shape], [p.sources[source], "line"]];
        }))),
      rest.length ? make("p", {class: "note", text: `and ${rest.length} more kinds of tensors, ${bytes(rest.reduce((sum, [, [size]]) => sum + size, 0))} together`}) : "",
    );
    this.keepHeight();
  }

  /** Makes a kind of collective stand out, and goes to where it runs first. */
  point(kind) {
    this.chosen = kind;
    const {waited_runs, hidden_runs} = this.program;
    const first = waited_runs.find((run) => run[0] === kind) ?? hidden_runs.find((run) => run[0] === kind);
    this.isHeld = true;
    if (this.models) this.fillRuns();
    if (first) this.toTick(first[1], 1);
  }
}

/** The number of entries that are not above `value`, of rising ones. */
function upper(rising, value) {
  let low = 0, high = rising.length;
  while (low < high) { const middle = (low + high) >> 1; if (rising[middle] <= value) low = middle + 1; else high = middle; }
  return low;
}

/** The run, of runs one after another, that is at work at `tick`; the one that begins there rather than the one that ends. */
function running(runs, tick) {
  let low = 0, high = runs.length;
  while (low < high) { const middle = (low + high) >> 1; if (runs[middle][1] <= tick) low = middle + 1; else high = middle; }
  const run = runs[low - 1];
  return run && tick < run[2] ? run : null;
}

/** A path that may be broken behind its dots. */
function breakable(path) {
  return path.split(/(?<=\.)/).flatMap((part, k) => (k ? [make("wbr"), part] : [part]));
}

function described(what, tensor, source) {
  return make("p", {}, `${what}${tensor ? `: ${tensor}` : ""} `, source ? make("code", {text: source}) : "");
}

function tableOf(columns, rows) {
  return make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map(([name, kind]) => make("th", {scope: "col", class: kind, text: name})))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(([text, kind]) =>
      make("td", {class: kind}, ...(kind === "path" ? breakable(text) : [text])))))));
}

/* ---- the model ---- */

const MOST_FOUND = 300;

class ModelPanel {
  constructor() {
    this.table = find("#tree");
    if (!this.table) return;
    find("#search").addEventListener("input", (event) => this.search(event.target.value.trim()));
    find("#unfold").addEventListener("click", () => {
      this.isUnfolded = !this.isUnfolded;
      find("#unfold").textContent = this.isUnfolded ? "Fold all" : "Unfold all";
      find("#search").value = "";
      this.tree();
    });
  }

  show(program) {
    this.program = program;
    this.isUnfolded = false;
    this.most = {};
    const total = (module, key) => module.costs[key];
    for (const key of ["device_bytes", "time"]) {
      this.most[key] = Math.max(1e-30, program.modules.reduce((sum, m) => sum + (key === "time" ? m.costs.compute_s + m.costs.exposed_s : total(m, key)), 0));
    }
    this.tree();
  }

  head() {
    const names = [["path"], ["layout"], ["shape"], ["on a device", "number"], ["whole", "number"], ["kernels", "number"],
      ["waited for", "number"], ["hidden", "number"], ["sent", "number"], ["line that reads it first"]];
    return make("thead", {}, make("tr", {}, ...names.map(([name, kind]) => make("th", {scope: "col", class: kind, text: name}))));
  }

  tree() {
    this.rows = new Map();
    const body = make("tbody");
    this.table.replaceChildren(make("caption", {text: "Arguments of the program"}), this.head(), body);
    find("#found").textContent = "";
    const open = this.isUnfolded;
    for (const module of this.program.modules) this.append(body, module, 0, open);
    if (!open) {  // down to where there is a choice
      let level = this.program.modules;
      while (level.length === 1 && level[0].children.length) { this.open(level[0]); level = level[0].children; }
      for (const module of level) if (module.children.length && level.length <= 3) this.open(module);
    }
  }

  append(body, module, depth, isOpen) {
    const row = this.row(module, depth, module.name);
    body.append(row.element);
    this.rows.set(module, row);
    if (isOpen && module.children.length) this.open(module, true);
  }

  row(module, depth, name) {
    const c = module.costs, count = module.count > 1 ? ` (${module.count} x)` : "";
    const label = module.children.length
      ? make("button", {type: "button", class: "plain", "aria-expanded": "false", onclick: () => this.toggle(module)}, `▸ ${name}${count}`)
      : make("span", {text: `${name}${count}`});
    const cell = make("td", {class: "path", style: `padding-left:${0.2 + 1.1 * depth}rem`}, label);
    const number = (text, part) => make("td", {class: part ? "number share" : "number", style: part ? `--part:${(100 * part).toFixed(1)}%` : null, text});
    const time = c.compute_s + c.exposed_s;
    const element = make("tr", {tabindex: "-1"}, cell,
      make("td", {class: "path", text: module.layout}), make("td", {class: "path", text: module.shape}),
      number(bytes(c.device_bytes), c.device_bytes / this.most.device_bytes), number(bytes(c.whole_bytes)),
      number(seconds(c.compute_s), time / this.most.time), number(seconds(c.exposed_s)), number(seconds(c.hidden_s)),
      number(bytes(c.sent_bytes)), make("td", {class: "line", text: module.source}));
    return {element, depth, isOpen: false, button: module.children.length ? label : null, name: `${name}${count}`};
  }

  toggle(module) {
    if (this.rows.get(module).isOpen) this.close(module);
    else this.open(module);
  }

  open(module, deep = false) {
    const row = this.rows.get(module);
    if (row.isOpen) return;
    row.isOpen = true;
    row.button.setAttribute("aria-expanded", "true");
    row.button.textContent = `▾ ${row.name}`;
    let last = row.element;
    for (const child of module.children) {
      const inner = this.row(child, row.depth + 1, child.name);
      this.rows.set(child, inner);
      last.after(inner.element);
      last = inner.element;
      if (deep && child.children.length) { this.open(child, true); last = this.lastOf(child); }
    }
  }

  lastOf(module) {
    const row = this.rows.get(module);
    return row.isOpen && module.children.length ? this.lastOf(module.children.at(-1)) : row.element;
  }

  close(module) {
    const row = this.rows.get(module);
    for (const child of module.children) {
      if (this.rows.get(child)?.isOpen) this.close(child);
      this.rows.get(child)?.element.remove();
      this.rows.delete(child);
    }
    row.isOpen = false;
    row.button.setAttribute("aria-expanded", "false");
    row.button.textContent = `▸ ${row.name}`;
  }

  /** Tensors whose path has the text; a number stands for any layer. */
  search(text) {
    if (!text) { this.tree(); return; }
    const wanted = text.toLowerCase().replace(/(^|[._])\d+(?=$|[._])/g, "$1*");
    const found = [];
    const visit = (module) => {
      if (!module.children.length && module.path.toLowerCase().includes(wanted)) found.push(module);
      module.children.forEach(visit);
    };
    this.program.modules.forEach(visit);
    this.rows = new Map();
    this.table.replaceChildren(make("caption", {text: `Arguments with “${text}” in their path`}), this.head(),
      make("tbody", {}, ...found.slice(0, MOST_FOUND).map((module) => this.row(module, 0, module.path).element)));
    const tensors = found.reduce((sum, module) => sum + module.count, 0);
    find("#found").textContent = `${tensors} tensor${tensors === 1 ? "" : "s"} of ${found.length} kind${found.length === 1 ? "" : "s"}`
      + (found.length > MOST_FOUND ? `; the first ${MOST_FOUND} are shown` : "");
  }

  /** Opens the tree at a path, and goes there. */
  reveal(path) {
    const trail = (modules) => {
      for (const module of modules) {
        if (!module.children.length && module.path === path) return [module];
        const inner = trail(module.children);
        if (inner) return [module, ...inner];
      }
      return null;
    };
    const way = trail(this.program.modules);
    if (!way) return;
    find("#search").value = "";
    this.tree();
    for (const module of way.slice(0, -1)) this.open(module);
    const {element} = this.rows.get(way.at(-1));
    element.classList.add("flash");
    element.scrollIntoView({block: "center"});
    element.focus({preventScroll: true});
  }
}

/* ---- collectives ---- */

const MOST_COLLECTIVES = 60;

class CollectivesPanel {
  constructor() { this.table = find("#collective-table"); }

  show(program) {
    this.program = program;
    const names = [["collective"], ["waited for", "number"], ["hidden", "number"], ["sent", "number"], ["times", "number"],
      ["axes"], ["tensor"], ["line"]];
    const body = make("tbody");
    const list = program.collectives;
    list.slice(0, MOST_COLLECTIVES).forEach((one, kind) => body.append(this.row(one, kind)));
    this.table.replaceChildren(
      make("caption", {text: "Collectives of a step, for one device; those that are waited for longest come first"}),
      make("thead", {}, make("tr", {}, ...names.map(([name, kind]) => make("th", {scope: "col", class: kind, text: name})))), body);
    const note = find("#collectives-note");
    note.replaceChildren();
    if (!list.length) note.textContent = "There are none.";
    if (list.length > MOST_COLLECTIVES) {
      note.append(make("button", {type: "button", text: `Show ${list.length - MOST_COLLECTIVES} more`, onclick: () => {
        list.slice(MOST_COLLECTIVES).forEach((one, k) => body.append(this.row(one, k + MOST_COLLECTIVES)));
        note.replaceChildren();
      }}));
    }
  }

  row(one, kind) {
    const [name, axes, tensor, shape, , , , argument, source, count, , exposed, hidden, sent, shade] = one;
    const button = make("button", {type: "button", class: "plain", "aria-expanded": "false", onclick: () => {
      const isOpen = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!isOpen));
      if (isOpen) element.nextElementSibling.remove();
      else element.after(this.detail(one, kind));
    }}, make("span", {class: "swatch", style: `background:${shade}`}), name);
    const element = make("tr", {}, make("td", {}, button),
      make("td", {class: "number", text: seconds(exposed)}), make("td", {class: "number", text: seconds(hidden)}),
      make("td", {class: "number", text: bytes(sent)}), make("td", {class: "number", text: threeFigures(count)}),
      make("td", {text: axes}), make("td", {class: "path"}, ...breakable(`${argument || tensor} ${shape}`)),
      make("td", {class: "line", text: this.program.sources[source]}));
    return element;
  }

  /** Why a collective runs, and ways to what causes it. */
  detail(one, kind) {
    const [name, axes, tensor, shape, madeBy, before, after, argument, source, count, time, , , , , layers] = one;
    const line = this.program.sources[source];
    const cell = make("td", {colspan: "8"});
    const say = (...parts) => cell.append(make("p", {style: "margin:0.2rem 0 0.2rem 1.4rem"}, ...parts));
    if (after) {
      const change = before === "partial sums"
        ? `Each device along ${axes} has a partial sum; the sum is laid out as ${after}.`
        : `It lies as ${before} and is read as ${after}.`;
      say("Tensor ", make("code", {text: `${shape || "scalar"}`}), ", made by ", make("code", {text: madeBy}), `. ${change}`);
    }
    if (line) say("For what runs at ", make("code", {text: line}), ".");
    say(`${threeFigures(count)} times in a step, for ${layers} tensor${layers === 1 ? "" : "s"}; ${seconds(time)} together, ${seconds(time / (count || 1))} each.`);
    const links = make("p", {class: "controls", style: "margin-left:1.4rem"});
    if (argument) links.append(make("button", {type: "button", text: `Show ${argument} in the model`, onclick: () => modelPanel.reveal(argument)}));
    if (this.program.has_profile) {
      links.append(make("button", {type: "button", text: "Show it over time", onclick: () => {
        stepPanel.point(kind);
        find("#step").scrollIntoView();
        find("#cursor").focus({preventScroll: true});
      }}));
    }
    cell.append(links);
    return make("tr", {class: "detail"}, cell);
  }
}

/* ---- the page ---- */

const stepPanel = new StepPanel(), modelPanel = new ModelPanel(), collectivesPanel = new CollectivesPanel();

function showProgram(number) {
  const program = JSON.parse(find(`#program-${number}`).textContent);
  for (const panel of [stepPanel, modelPanel, collectivesPanel]) panel.show(program);
  for (const element of findAll("[data-program]")) element.hidden = element.dataset.program !== String(number);
}

function isDark() {
  const asked = document.documentElement.dataset.theme;
  return asked ? asked === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

async function repaint() {
  find("#theme").textContent = isDark() ? "Light" : "Dark";
  for (const drawn of documents.values()) paint(await drawn);
}

find("#theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
addEventListener("beforeprint", () => findAll(".plot").forEach((place) => draw(place)));

Bokeh.set_log_level("warn");
if (find("#program-0")) showProgram(0);
find("#program")?.addEventListener("change", (event) => showProgram(event.target.value));
repaint();
for (const place of findAll(".plot")) visible.observe(place);
document.documentElement.dataset.ready = "yes";
