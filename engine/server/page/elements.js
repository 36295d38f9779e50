// Elements of the page.

const at = (id) => document.getElementById(id);

function element(tag, text, style) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  Object.entries(style || {}).forEach(([name, value]) => made.style.setProperty(name, value));
  return made;
}
