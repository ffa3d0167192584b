// The head explorer: what a word looks at, what it becomes on its way, and what the output loses without some heads.
(() => {
  "use strict";
  const source = document.getElementById("explorer-data");
  if (!source) return;
  const { words, examples, word, layers } = JSON.parse(source.textContent);
  const state = { layer: examples[0][0], head: examples[0][1], word, off: new Set() };
  let pointed = null; // the word under the pointer, which is shown as long as it is there

  const make = (tag, attributes = {}, ...content) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...content);
    return made;
  };
  const number = (value) => value.toFixed(2).replace("-", "−");
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const length = (vector) => Math.hypot(...vector);

  // The data

  const unpack = ({ axes, shape, unit, colour, values }) => {
    const bytes = Uint8Array.from(atob(values), (letter) => letter.charCodeAt(0));
    return { axes, shape, colour, values: Float64Array.from(new Int16Array(bytes.buffer), (value) => value * unit) };
  };
  for (const layer of layers) {
    for (const name of Object.keys(layer.arrays)) layer.arrays[name] = unpack(layer.arrays[name]);
  }
  const here = () => layers.find((layer) => layer.layer === state.layer);
  const heads = () => here().heads.map((_, head) => head);
  const isOn = (head) => !state.off.has(head);

  /** What one word has of an array, in one head: the numbers along its last axis. */
  const along = ({ axes, shape, values }, head, word) => {
    const place = { batch: 0, h: head, h_kv: head, seq_q: word, seq_k: word };
    const start = axes.slice(0, -1).reduce((at, axis, i) => at * shape[i] + place[axis], 0);
    return values.subarray(start * shape.at(-1), (start + 1) * shape.at(-1));
  };
  const sumOf = (vectors) => vectors.reduce((sum, vector) => sum.map((value, i) => value + vector[i]));
  const added = (word, some) => some.map((head) => along(here().arrays.added, head, word));
  const slots = (word, isFilled) =>
    heads().flatMap((head) => Array.from(along(here().arrays.blend, head, word), (value) => (isFilled(head) ? value : 0)));
  const output = (word, isHeard) => sumOf([here().arrays.b_o.values, ...added(word, heads().filter(isHeard))]);
  const loss = (word) => (state.off.size ? length(sumOf(added(word, [...state.off]))) / length(sumOf(added(word, heads()))) : 0);

  // The choice, and its address

  const choice = document.getElementById("explorer-choice");
  const select = (name, options) => {
    const made = make("select", { id: `explorer-${name}` }, ...options.map(([value, text]) => make("option", { value }, text)));
    made.addEventListener("change", () => set({ [name]: Number(made.value) }));
    choice.append(make("label", { for: made.id }, name), made);
    return made;
  };
  const selects = {
    layer: select("layer", layers.map(({ layer }) => [layer, layer])),
    head: select("head", heads().map((head) => [head, head])),
    word: select("word", words.map((name, i) => [i, name])),
  };
  const example = ([layer, head]) => {
    const button = make("button", { type: "button" }, `layer ${layer}, head ${head}`);
    button.addEventListener("click", () => set({ layer, head }));
    return button;
  };
  choice.after(make("p", { class: "explorer-examples" }, "Heads worth a look: ", ...examples.map(example)));

  const set = (changes) => {
    if ("layer" in changes && changes.layer !== state.layer) state.off = new Set(); // its heads are others
    Object.assign(state, changes);
    const off = state.off.size ? `&off=${[...state.off].sort((a, b) => a - b)}` : "";
    history.replaceState(history.state, "", `#layer=${state.layer}&head=${state.head}&word=${state.word}${off}`);
    show();
  };
  const read = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const fits = { layer: (n) => layers.some(({ layer }) => layer === n), head: (n) => n in here().heads, word: (n) => n in words };
    for (const [name, isRight] of Object.entries(fits)) {
      if (/^\d+$/.test(given.get(name)) && isRight(Number(given.get(name)))) state[name] = Number(given.get(name));
    }
    if (given.has("layer")) {
      const off = (given.get("off") ?? "").split(",").filter((head) => /^\d+$/.test(head));
      state.off = new Set(off.map(Number).filter(fits.head));
    }
    show();
  };

  // What a word looks at

  const table = document.querySelector("table.weights");
  const rows = [...table.tBodies[0].rows];
  rows.forEach((row, i) => {
    const button = make("button", { type: "button", "aria-label": words[i] }, row.cells[0].textContent);
    row.cells[0].replaceChildren(button);
    button.addEventListener("focus", () => set({ word: i }));
    row.addEventListener("click", () => set({ word: i }));
    row.addEventListener("pointerenter", () => point(i));
  });
  table.tBodies[0].addEventListener("pointerleave", () => point(null));
  const looks = make("p", { role: "status", class: "explorer-looks" });
  table.parentElement.after(looks);

  const point = (word) => {
    pointed = word;
    show();
  };
  const list = (parts) => (parts.length > 1 ? `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}` : parts[0]);

  const showWeights = (word) => {
    const { habit, weights } = here().heads[state.head];
    document.getElementById("shown-head").textContent = `Layer ${state.layer}, head ${state.head}`;
    rows.forEach((row, i) => {
      row.classList.toggle("chosen", i === word);
      row.querySelector("button").setAttribute("aria-pressed", i === word);
      weights[i].forEach((weight, j) => {
        const cell = row.cells[j + 1];
        cell.textContent = weight.toFixed(2);
        cell.style.setProperty("--weight", weight.toFixed(2));
      });
    });
    const best = weights[word].map((weight, i) => [weight, i]).sort(([one], [other]) => other - one).slice(0, 3);
    const seen = best.filter(([weight]) => weight >= 0.005);
    const given = seen.map(([weight, i]) => `${weight.toFixed(2)} to ${i === word ? "itself" : words[i]}`);
    looks.textContent = `Head ${state.head} of layer ${state.layer}: ${words[word]} gives ${list(given)}. What most words look at most: ${habit}.`;
  };

  // The way of a word

  const strip = (vector, whole, colour) => {
    const scale = Math.max(...whole.map(Math.abs));
    const bars = (values) => Array.from(values, (value, i) => `M${i} 0v${(-value / scale).toFixed(3)}h1V0z`).join("");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [name, value] of Object.entries({ viewBox: `0 -1 ${whole.length} 2`, preserveAspectRatio: "none", "aria-hidden": "true" })) {
      svg.setAttribute(name, value);
    }
    const draw = (tag, attributes) => {
      const made = document.createElementNS(svg.namespaceURI, tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      svg.append(made);
    };
    draw("path", { d: bars(whole), class: "whole" });
    draw("path", { d: bars(vector), style: `fill:${colour}` });
    draw("path", { d: `M0 0H${whole.length}`, class: "zero" });
    return { svg, draw };
  };
  const said = (who, vector) =>
    `${who}: ${vector.length} numbers from ${number(Math.min(...vector))} to ${number(Math.max(...vector))}, length ${number(length(vector))}`;

  const ofWord = {
    concatenate: (word) => {
      const { blend } = here().arrays;
      const [vector, width] = [slots(word, isOn), blend.shape.at(-1)];
      const { svg, draw } = strip(vector, slots(word, () => true), blend.colour);
      draw("rect", { x: state.head * width, y: -1, width, height: 2, class: "slot" });
      return [svg, `${said(words[word], vector)}. Framed: the slot of head ${state.head}${without("; empty: the slots of ")}.`];
    },
    mix: (word) => {
      const vector = output(word, isOn);
      const { svg } = strip(vector, output(word, () => true), here().arrays.b_o.colour);
      return [svg, `${said(words[word], vector)}${without("; without ")}.`];
    },
  };
  const inArray = (array, word) => {
    const vector = along(array, state.head, word);
    const who = array.axes.some((axis) => axis.startsWith("h")) ? `${words[word]} in head ${state.head}` : words[word];
    if (array.axes.at(-1) !== "seq_k") return [strip(vector, vector, array.colour).svg, `${said(who, vector)}.`];
    const cells = Array.from(vector, (value, i) => make("span", {}, make("b", {}, number(value)), ` ${words[i]}`));
    return [make("span", { class: "cells" }, ...cells), `${who}, with each word.`];
  };
  const without = (start) => (state.off.size ? start + named([...state.off]) : "");
  const named = (some) => (some.length > 1 ? `the heads ${list(some.sort((a, b) => a - b))}` : `head ${some[0]}`);

  const items = [...document.querySelectorAll(".path > li")];
  items.forEach((item) => item.append(make("figure"), make("p", { class: "numbers" })));
  const showPath = (word) => {
    for (const item of items) {
      const name = item.dataset.array;
      const [picture, text] = ofWord[name]?.(word) ?? inArray(here().arrays[name], word);
      item.querySelector("figure").replaceChildren(picture);
      item.querySelector(".numbers").textContent = text;
    }
  };

  // Heads on and off

  const box = (name, title) => {
    const chips = make("div", { role: "group", "aria-label": `heads that are ${name}`, class: `chips ${name}` });
    return [chips, make("div", {}, make("span", { "aria-hidden": "true" }, title), chips)];
  };
  const [[on, onBox], [off, offBox]] = [box("on", "on"), box("off", "off: drop heads here")];
  const toggle = (head) => set({ off: new Set(heads().filter((one) => (one === head) === isOn(one))) });
  let handled = -Infinity; // when the pointer last did something
  const chips = heads().map((head) => {
    const chip = make("button", { type: "button" }, `head ${head}`);
    let [start, isDragged] = [null, false];
    const end = () => {
      start = null;
      chip.style.translate = "";
    };
    chip.addEventListener("click", (event) => {
      if (event.detail && event.timeStamp - handled < 1000) return; // it follows, perhaps on a chip that took the place
      toggle(head);
    });
    chip.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      [start, isDragged] = [event, false];
      chip.setPointerCapture(event.pointerId);
    });
    chip.addEventListener("pointermove", (event) => {
      if (!start) return;
      const [x, y] = [event.clientX - start.clientX, event.clientY - start.clientY];
      isDragged ||= Math.hypot(x, y) > 6; // a hand that trembles drags nothing
      if (isDragged) chip.style.translate = `${x}px ${y}px`;
    });
    chip.addEventListener("pointerup", (event) => {
      if (!start) return;
      const other = (isOn(head) ? offBox : onBox).getBoundingClientRect();
      const isInside = event.clientX > other.left && event.clientX < other.right && event.clientY > other.top && event.clientY < other.bottom;
      end();
      handled = event.timeStamp;
      if (isInside || !isDragged) toggle(head);
    });
    chip.addEventListener("pointercancel", end);
    return chip;
  });
  const command = (text, isLeft) => {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => set({ off: new Set(heads().filter((head) => !isLeft(head))) }));
    return button;
  };
  const commands = [command("all on", () => true), command("only the chosen head on", (head) => head === state.head)];
  const losses = make("tbody");
  const lost = make("p", { role: "status", class: "explorer-lost" });
  const head = make("tr", {}, ...["word", "", "y loses"].map((title) => (title ? make("th", { scope: "col" }, title) : make("td"))));
  document.getElementById("explorer-board").append(
    make("div", { class: "boxes" }, onBox, offBox),
    make("p", { class: "explorer-examples" }, ...commands),
    lost,
    make("table", { class: "losses" }, make("thead", {}, head), losses),
  );

  const showBoard = (word) => {
    chips.forEach((chip, head) => {
      const place = isOn(head) ? on : off;
      chip.setAttribute("aria-pressed", isOn(head));
      if (chip.parentElement === place) return;
      const hasFocus = document.activeElement === chip;
      place.insertBefore(chip, chips.find((other, i) => i > head && other.parentElement === place) ?? null);
      if (hasFocus) chip.focus();
    });
    const shares = words.map((_, i) => loss(i));
    const scale = Math.max(1, ...shares);
    losses.replaceChildren(...shares.map((share, i) => make(
      "tr",
      i === word ? { class: "chosen" } : {},
      make("th", { scope: "row" }, words[i]),
      make("td", {}, make("span", { class: "bar", style: `--share:${(share / scale).toFixed(3)}` })),
      make("td", {}, percent(share)),
    )));
    const [least, most] = [shares.indexOf(Math.min(...shares)), shares.indexOf(Math.max(...shares))];
    lost.textContent = state.off.size
      ? `Without ${named([...state.off])} of layer ${state.layer}, y loses from ${percent(shares[least])} (${words[least]}) to ${percent(shares[most])} (${words[most]}) of its length.`
      : `All heads of layer ${state.layer} are on: y loses nothing.`;
  };

  const show = () => {
    const word = pointed ?? state.word;
    for (const [name, select] of Object.entries(selects)) select.value = state[name];
    showWeights(word);
    showPath(word);
    showBoard(word);
  };
  addEventListener("hashchange", read);
  read();
})();
