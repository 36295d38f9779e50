// Conversations, kept in this browser. A browser without storage, or with a full one, keeps them until the page is closed.

const STORED = "conversations", MOST_CONVERSATIONS = 50;
let conversations = [], current = null;

function loadConversations() {
  try {
    const found = JSON.parse(localStorage.getItem(STORED) || "[]");
    conversations = Array.isArray(found) ? found.filter((each) => each && Array.isArray(each.turns)) : [];
  } catch {
    conversations = [];
  }
}

function storeConversations() {
  conversations = conversations.slice(0, MOST_CONVERSATIONS);
  for (let count = conversations.length; count >= 0; count = Math.floor(count / 2)) {
    try {
      return localStorage.setItem(STORED, JSON.stringify(conversations.slice(0, count)));
    } catch {
      if (count === 0) return;
    }
  }
}

// The turns without their elements on the page.
function plainTurns() {
  return turns.filter((turn) => turn.role !== "failed").map(({ role, text, reasoning, calls, call }) => ({ role, text, reasoning, calls, call }));
}

function keepConversation() {
  const kept = plainTurns();
  if (!kept.length) return;
  const first = kept.find((turn) => turn.role === "user") || kept[0];
  const own = conversations.find((each) => each.id === current) || { id: `${Date.now()}-${Math.random().toString(36).slice(2)}` };
  current = own.id;
  Object.assign(own, { title: first.text.trim().slice(0, 60) || "Untitled", turns: kept });
  conversations = [own, ...conversations.filter((each) => each !== own)];
  storeConversations();
  listConversations();
}

function listConversations() {
  at("conversations").replaceChildren(...conversations.map((own) => {
    const item = element("li"), open = element("button", own.title), gone = element("button", "×");
    item.className = own.id === current ? "open" : "";
    open.type = gone.type = "button";
    open.className = "title";
    open.title = own.title;
    gone.setAttribute("aria-label", `Delete ${own.title}`);
    open.addEventListener("click", () => openConversation(own.id));
    gone.addEventListener("click", () => deleteConversation(own.id));
    item.append(open, gone);
    return item;
  }));
}

// Keep what there is of an answer that is not complete.
function keepRunning() {
  if (running) keepConversation();
}

function openConversation(id) {
  keepRunning();
  const own = conversations.find((each) => each.id === id);
  if (!own) return;
  showTurns(own.turns);
  current = id;
  listConversations();
}

function deleteConversation(id) {
  conversations = conversations.filter((each) => each.id !== id);
  storeConversations();
  if (id === current) showTurns([]);
  listConversations();
}
