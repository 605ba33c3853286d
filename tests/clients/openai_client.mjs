// What OpenAI's JavaScript client makes of the server at argv[2]; one JSON object on stdout.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const found = {};

const whole = await client.chat.completions.create({ model: "scripted", messages, logprobs: true, top_logprobs: 1 });
found.whole = whole.choices[0].message.content;
found.usage = whole.usage.completion_tokens;

const stream = await client.chat.completions.create({
  model: "scripted",
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
found.streamed = "";
for await (const chunk of stream) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
  found.finish = chunk.choices[0]?.finish_reason ?? found.finish;
  found.streamUsage = chunk.usage?.completion_tokens ?? found.streamUsage;
}

const helper = client.chat.completions.stream({ model: "scripted", messages });
found.helper = await helper.finalContent();

const response = await client.responses.create({ model: "scripted", input: "hi" });
found.response = response.output_text;

found.models = (await client.models.list()).data.map((model) => model.id);
found.embedding = (await client.embeddings.create({ model: "scripted", input: "a" })).data[0].embedding.length;

try {
  await client.chat.completions.create({ model: "nobody", messages });
} catch (error) {
  found.error = [error.constructor.name, error.status, error.code, error.param];
}
console.log(JSON.stringify(found));
