// Markdown as elements. Text only ever becomes text nodes, so that no markup of a model is run; links are to http and https.

// Repetitions have limits, so that no text takes longer than its length times a constant.
const INLINE = new RegExp([
  /(`{1,9})([^`]|[^`][\s\S]{0,1000}?[^`])\1(?!`)/, /\*\*(?=\S)([\s\S]{0,1000}?\S)\*\*/, /\*(?=[^\s*])([^*]{0,1000}?[^\s*])\*/,
  /\[([^\]\n]{0,500})\]\(([^\s()]{0,2000})\)/,
].map((each) => each.source).join("|"));
const MOST_DEPTH = 20;

function inline(parent, text, depth = 0) {
  while (text) {
    const found = depth < MOST_DEPTH && INLINE.exec(text);
    if (!found) return parent.append(text);
    parent.append(text.slice(0, found.index));
    text = text.slice(found.index + found[0].length);
    const [whole, , code, bold, italic, label, place] = found;
    if (code !== undefined) parent.append(element("code", code));
    else if (place !== undefined) parent.append(/^https?:\/\//.test(place) ? link(label || place, place) : whole);
    else {
      const made = element(bold === undefined ? "em" : "strong");
      inline(made, bold === undefined ? italic : bold, depth + 1);
      parent.append(made);
    }
  }
}

function link(label, place) {
  const made = element("a", label);
  made.href = place;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  return made;
}

function codeBlock(text, language) {
  const block = element("div"), copy = element("button", "Copy"), pre = element("pre"), code = element("code", text);
  block.className = "block";
  if (language) code.dataset.language = language;
  copy.type = "button";
  copy.addEventListener("click", () => copyText(copy, code.textContent));
  pre.append(code);
  block.append(pre, copy);
  return block;
}

async function copyText(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function table(lines) {
  const made = element("table");
  lines.filter((_, row) => row !== 1).forEach((line, row) => {
    const cells = line.trim().replace(/^\||\|$/g, "").split("|"), shown = element("tr");
    for (const cell of cells) {
      const each = element(row ? "td" : "th");
      inline(each, cell.trim());
      shown.append(each);
    }
    made.append(shown);
  });
  return made;
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

function list(lines) {
  const made = element(/^\s*\d/.test(lines[0]) ? "ol" : "ul");
  if (made.tagName === "OL") made.start = parseInt(lines[0], 10);
  for (const line of lines) {
    const item = element("li"), found = ITEM.exec(line);
    item.style.setProperty("margin-left", `${Math.min(4, Math.floor(found[1].length / 2)) * 20}px`);
    inline(item, found[3]);
    made.append(item);
  }
  return made;
}

// Replaces the content of an element by the Markdown of a text, which may be incomplete: it grows while a model writes it.
function renderMarkdown(parent, text, depth = 0) {
  const lines = text.split("\n"), made = [];
  const isBreak = (line) => !line.trim() || /^\s*(```|~~~)/.test(line) || /^#{1,6}\s/.test(line) || ITEM.test(line) || /^>/.test(line);
  for (let at = 0; at < lines.length;) {
    const line = lines[at], fence = /^\s*(```+|~~~+)\s*(\S*)/.exec(line), heading = /^(#{1,6})\s+(.*)$/.exec(line);
    const run = (holds) => { const from = at; while (at < lines.length && holds(lines[at])) at += 1; return lines.slice(from, at); };
    if (!line.trim()) at += 1;
    else if (fence) {
      at += 1;
      const body = run((each) => !each.trim().startsWith(fence[1]));
      at += 1;
      made.push(codeBlock(body.join("\n"), fence[2]));
    } else if (heading) {
      const shown = element(`h${Math.min(4, heading[1].length)}`);
      inline(shown, heading[2]);
      made.push(shown);
      at += 1;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      made.push(element("hr"));
      at += 1;
    } else if (ITEM.test(line)) made.push(list(run((each) => ITEM.test(each))));
    else if (/^>/.test(line) && depth < MOST_DEPTH) {
      const quote = element("blockquote");
      renderMarkdown(quote, run((each) => /^>/.test(each)).map((each) => each.replace(/^> ?/, "")).join("\n"), depth + 1);
      made.push(quote);
    } else if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[at + 1] || "") && lines[at + 1].includes("|")) {
      made.push(table(run((each) => each.includes("|"))));
    } else {
      const paragraph = element("p");
      at += 1;
      inline(paragraph, [line, ...run((each) => !isBreak(each))].join("\n"));
      made.push(paragraph);
    }
  }
  parent.replaceChildren(...made);
}
