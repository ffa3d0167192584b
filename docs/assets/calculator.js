// The shape calculator. Every formula, rule and sentence comes from the library, as data in the page; this works them out.
(function () {
  "use strict";

  const found = (id) => document.getElementById(`calculator-${id}`);
  const data = JSON.parse(found("data").textContent);
  const form = found("form");
  const fields = [...form.querySelectorAll("input, select")];
  const links = Object.fromEntries([...found("steps").querySelectorAll("a")].map((link) => [link.textContent, link.href]));

  // Arithmetic on whole numbers of any size. ------------------------------------------------------------------------------

  const PRODUCTS = { "*": (a, b) => a * b, "//": (a, b) => a / b };
  const SUMS = { "+": (a, b) => a + b, "-": (a, b) => a - b };

  function evaluate(formula, sizes) {
    const words = formula.match(/\w+|\/\/|\S/g);
    const chained = (part, operations) => () => {
      let value = part();
      while (words[0] in operations) value = operations[words.shift()](value, part());
      return value;
    };
    const atom = () => {
      const word = words.shift();
      if (word !== "(") return /^\d/.test(word) ? BigInt(word) : sizes[word];
      const value = sum();
      words.shift();
      return value;
    };
    const sum = chained(chained(atom, PRODUCTS), SUMS);
    return sum();
  }

  // Sizes, checked and filled in by the library's rules. -----------------------------------------------------------------

  class ConfigError extends Error {
    constructor(name, template, words) {
      super(template.replace(/\{(\w+)\}/g, (_, word) => words[word]));
      this.field = name;
    }
  }

  function settle(owner, rules, given, called = {}) {
    const sizes = { ...given };
    for (const rule of rules) {
      const name = called[rule.name] ?? rule.name;
      if ("default" in rule) {
        const size = sizes[rule.name] === null && rule.default ? evaluate(rule.default, sizes) : sizes[rule.name];
        if (typeof size !== "bigint" || size < 1n) {
          throw new ConfigError(name, data.sentences.positive, { owner, name, size: written(size) });
        }
        sizes[rule.name] = size;
      } else if (!(rule.unless && given[rule.unless] !== null) && sizes[rule.whole] % sizes[rule.name]) {
        const near = nearDivisors(sizes[rule.choices], sizes[rule.name]).map((size) => `${name}=${size}`).join(" and ");
        const words = { owner, name, size: sizes[rule.name], whole: rule.whole, of: sizes[rule.whole], near, otherwise: rule.otherwise };
        throw new ConfigError(name, data.sentences.divides, words);
      }
    }
    return sizes;
  }

  function nearDivisors(whole, wanted) {
    const small = [];
    for (let size = 1n; size * size <= whole; size++) if (!(whole % size)) small.push(size);
    const divisors = [...small, ...small.map((size) => whole / size).reverse()];
    return [...divisors.filter((size) => size < wanted).slice(-1), ...divisors.filter((size) => size > wanted).slice(0, 1)];
  }

  // As Python writes it: a number, None, or text in quotes.
  function written(value) {
    if (typeof value !== "string") return value === null ? "None" : String(value);
    const text = value.replace(/\\/g, "\\\\");
    return text.includes("'") && !text.includes('"') ? `"${text}"` : `'${text.replace(/'/g, "\\'")}'`;
  }

  function resized(formulas, sizes) {
    return { ...sizes, ...Object.fromEntries(Object.entries(formulas).map(([name, formula]) => [name, evaluate(formula, sizes)])) };
  }

  // The books. ------------------------------------------------------------------------------------------------------------

  function cellOf(cell, sizes, dtype) {
    const shape = cell.shape.map((size) => evaluate(size, sizes));
    return { axes: cell.axes, shape, dtype: cell.dtype, bytes: shape.reduce((a, b) => a * b, BigInt(data.dtypes[cell.dtype || dtype])) };
  }

  function booksOf(sizes, { bias, causal, dtype }) {
    const lines = data.chains[[sizes.h_kv !== sizes.h, bias, causal].map(Number).join("")].map((line) => {
      const result = cellOf(line.result, sizes, dtype);
      return {
        step: line.step,
        stage: line.stage,
        arguments: Object.entries(line.arguments).map(([name, cell]) => [name, cellOf(cell, sizes, dtype)]),
        result,
        parameters: evaluate(line.parameters, sizes),
        multiply_adds: evaluate(line.multiply_adds, sizes),
        bytes: result.bytes,
      };
    });
    const total = (name) => lines.reduce((sum, line) => sum + line[name], 0n);
    return { lines, parameters: total("parameters"), multiply_adds: total("multiply_adds"), bytes: total("bytes") };
  }

  function crossings(sizes, ranks, cross, dtype) {
    return data.network.filter((one) => cross || !one.cross).map((one) => {
      const cell = cellOf(one, sizes, dtype);
      return { array: one.array, cell, bytes: cell.bytes, sent: evaluate(data.sent, { ranks, bytes: cell.bytes }) };
    });
  }

  // Words and numbers. ----------------------------------------------------------------------------------------------------

  const count = (number) => number.toLocaleString("en");
  const ratio = new Intl.NumberFormat("en", { minimumFractionDigits: 3, maximumFractionDigits: 3, roundingMode: "halfEven" });
  const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, roundingMode: "halfEven", useGrouping: false });
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0, roundingMode: "halfEven", useGrouping: false });

  function scaled(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let number = Number(bytes);
    let power = 0;
    for (; number >= 1024 && power < units.length - 1; power++) number /= 1024;
    return `${(power && number < 999.5 ? digits : whole).format(number)} ${units[power]}`;
  }

  function element(tag, attributes, ...children) {
    const node = Object.assign(document.createElement(tag), attributes);
    node.append(...children);
    return node;
  }

  function shapeOf({ axes, shape, dtype }) {
    const spans = axes.flatMap((axis, index) => {
      const text = axis === String(shape[index]) ? axis : `${axis}=${shape[index]}`;
      const span = element("span", { className: "axis", textContent: text });
      span.style.color = data.colours[axis];
      return [span, " "];
    });
    return dtype ? [...spans, element("small", { textContent: dtype })] : spans;
  }

  const counted = (number) => [number ? count(number) : ""];
  const sized = (bytes) => [count(bytes), ...(bytes < 1024n ? [] : [" ", element("small", { textContent: scaled(bytes) })])];

  function row(className, head, ...cells) {
    const first = element("th", { scope: "row" }, ...head);
    return element("tr", { className }, first, ...cells.map((cell) => element("td", {}, ...cell)));
  }

  function table(id, caption, heads, bodies) {
    const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col", textContent: text })));
    const parts = [element("caption", { textContent: caption }), element("thead", {}, head)];
    const view = element("table", { id: `calculator-${id}`, className: "books" }, ...parts, ...bodies.map((rows) => element("tbody", {}, ...rows)));
    const box = element("div", { className: "books-box", tabIndex: 0 }, view);
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", caption);
    return box;
  }

  function chainTable(books, caption) {
    const bodies = [];
    let stage = "";
    for (const line of books.lines) {
      if (line.stage !== stage) {
        stage = line.stage;
        bodies.push([element("tr", { className: "stage" }, element("th", { scope: "rowgroup", textContent: stage }))]);
      }
      const rows = bodies[bodies.length - 1];
      rows.push(...line.arguments.map(([name, cell]) => row("taken", [name], shapeOf(cell), [], [], [])));
      const numbers = [counted(line.parameters), counted(line.multiply_adds), sized(line.bytes)];
      rows.push(row("step", [element("a", { href: links[line.step], textContent: line.step })], shapeOf(line.result), ...numbers));
    }
    bodies.push([row("total", ["together"], [], counted(books.parameters), counted(books.multiply_adds), sized(books.bytes))]);
    return table("chain", caption, ["array, step", "axes and sizes", "parameters", "multiply-adds", "bytes"], bodies);
  }

  function compared(id, caption, books) {
    const [first, second] = Object.values(books);
    const rows = ["parameters", "multiply_adds", "bytes"].map((name) => {
      const numbers = [first, second].map((one) => (name === "bytes" ? sized(one[name]) : [count(one[name])]));
      return row("", [name.replace("_", "-")], ...numbers, [ratio.format(Number(first[name]) / Number(second[name]))]);
    });
    return table(id, caption, ["total", ...Object.keys(books), "ratio"], [rows]);
  }

  function crossed(network) {
    const rows = network.map((one) => row("", [one.array], shapeOf(one.cell), sized(one.bytes), sized(one.sent)));
    return table("network", "What crosses the network, by an all-reduce each", ["array", "axes and sizes", "bytes", "sent by a rank"], [rows]);
  }

  // The form and the address. ---------------------------------------------------------------------------------------------

  const isBox = (field) => field.type === "checkbox";
  const initial = (field) => {
    if (isBox(field)) return String(Number(field.defaultChecked));
    return field.options ? [...field.options].find((option) => option.defaultSelected).value : field.defaultValue;
  };
  const typed = (field) => (isBox(field) ? String(Number(field.checked)) : field.value.trim());

  function fill(field, text) {
    if (isBox(field)) field.checked = text === "1";
    else field.value = text.slice(0, 9);
    if (field.options && field.selectedIndex < 0) field.value = initial(field);
  }

  function readAddress() {
    const state = new URLSearchParams(location.hash.slice(1));
    if (location.hash.includes("=") || !location.hash) for (const field of fields) fill(field, state.get(field.name) ?? initial(field));
    show();
  }

  function writeAddress() {
    const changed = fields.filter((field) => typed(field) !== initial(field)).map((field) => [field.name, typed(field)]);
    history.replaceState(null, "", changed.length ? `#${new URLSearchParams(changed)}` : location.pathname + location.search);
  }

  function given() {
    const size = (text) => (/^[+-]?\d+$/.test(text) ? BigInt(text) : text || null);
    return Object.fromEntries(
      fields.map((field) => [field.name, isBox(field) ? field.checked : field.options ? field.value : size(typed(field))]),
    );
  }

  function tables() {
    const { d_model, h, h_kv, d_k, d_v, batch, seq_q, seq_k, tp, ...choices } = given();
    const heads = settle("Heads", data.rules.heads, { d_model, h, h_kv, d_k, d_v, d_key_in: null, d_value_in: null });
    const inputs = settle("ledger", data.rules.inputs, { batch, seq_q, seq_k });
    for (const field of fields) if ("placeholder" in field) field.placeholder = heads[field.name] ?? inputs[field.name] ?? "";
    const keep = (sizes) => booksOf({ ...sizes, ...inputs }, choices);
    const books = keep(heads);
    const one = resized(data.merged, heads);
    const columns = { [`${heads.h} heads of width ${heads.d_k}`]: books, [`1 head of width ${one.d_k}`]: keep(one) };
    const whole = compared("merged", "The same budget, spent once or many times", columns);
    if (tp === null) return [whole, chainTable(books, `Every array, in ${choices.dtype} where nothing else is said; a step's line is what it gives`)];
    const share = resized(data.share, settle("Heads", data.rules.ranks, { ...heads, ranks: tp }, { ranks: "tp" }));
    return [
      whole,
      compared("shared", "One rank beside the whole layer", { [`1 rank of ${tp}`]: keep(share), "all heads on one": books }),
      crossed(crossings({ ...share, ...inputs }, tp, seq_k !== null, choices.dtype)),
      chainTable(keep(share), `Every array of one of ${tp} ranks, in ${choices.dtype} where nothing else is said; a step's line is what it gives`),
    ];
  }

  function show() {
    const results = found("results");
    let error = null;
    try {
      results.replaceChildren(...tables());
    } catch (problem) {
      if (!(problem instanceof ConfigError)) throw problem;
      error = problem;
    }
    found("error").textContent = error ? error.message : "";
    results.classList.toggle("wrong", Boolean(error)); // keeps its room, so that nothing jumps while one types
    for (const field of fields) field.setAttribute("aria-invalid", String(error?.field === field.name));
  }

  form.addEventListener("input", () => { show(); writeAddress(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("click", (event) => {
    const preset = data.presets[event.target.dataset.preset];
    if (!preset) return;
    for (const name of ["d_model", "h", "h_kv", "d_k", "d_v", "bias", "causal"]) fill(form.elements[name], String(preset[name] ?? ""));
    show();
    writeAddress();
  });
  addEventListener("hashchange", readAddress);

  found("default").remove();
  form.hidden = false;
  readAddress();
})();
