// The openai package of npm against a running server: node openai_npm.mjs URL, in a directory that has the package.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { default: OpenAI } = await import(pathToFileURL(createRequire(`${process.cwd()}/`).resolve("openai")).href).then(
  (found) => (found.default?.default ? found.default : found),
);
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const [{ id: model }] = (await client.models.list()).data;
const messages = [{ role: "user", content: "hi" }];

const chat = await client.chat.completions.create({ model, messages, max_tokens: 5, seed: 1, logprobs: true, top_logprobs: 2 });
assert.equal(chat.usage.completion_tokens, 5);
assert.equal(chat.choices[0].logprobs.content[0].top_logprobs.length, 2);

let text = "", usage;
const wanted = { model, messages, max_tokens: 5, seed: 1, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(wanted)) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, chat.choices[0].message.content);
assert.deepEqual([usage.completion_tokens, usage.prompt_tokens], [5, chat.usage.prompt_tokens]);

const completion = await client.completions.create({ model, prompt: "ab", max_tokens: 0, echo: true, logprobs: 0 });
assert.equal(completion.choices[0].text, "ab");
assert.deepEqual(completion.choices[0].logprobs.text_offset, [0, 1]);

await assert.rejects(client.completions.create({ model, prompt: "a", suffix: "b" }), (error) => error.status === 400 && error.param === "suffix");
await assert.rejects(client.completions.create({ model: "other", prompt: "a" }), (error) => error.code === "model_not_found");
console.log("ok");
