// @ts-check
/** The settings: system prompt, samplers, response format; only those that the server supports. */

import { call } from "./api.js";
import { byId, el, local } from "./dom.js";

const STORE = "martlet.settings";

/**
 * The samplers: the field's name, its label and the range of its number.
 * @type {{ name: string, label: string, hint: string, min?: number, max?: number, step: string }[]}
 */
const SAMPLERS = [
  { name: "temperature", label: "Temperature", hint: "0: always the likeliest token", min: 0, max: 5, step: "any" },
  { name: "top_p", label: "Top p", hint: "1: off", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top k", hint: "0: off", min: 0, step: "1" },
  { name: "min_p", label: "Min p", hint: "0: off", min: 0, max: 1, step: "any" },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "1: off", min: 0.01, step: "any" },
  { name: "presence_penalty", label: "Presence penalty", hint: "0: off", min: -2, max: 2, step: "any" },
  { name: "frequency_penalty", label: "Frequency penalty", hint: "0: off", min: -2, max: 2, step: "any" },
  { name: "seed", label: "Seed", hint: "the same seed gives the same answer", step: "1" },
  { name: "max_tokens", label: "Longest answer, in tokens", hint: "default: to the end of the context", min: 1, step: "1" },
];

const FORMATS = [
  { name: "text", label: "Text" },
  { name: "json_object", label: "JSON" },
  { name: "json_schema", label: "JSON by a schema" },
];
const TEMPERATURE = 0.7; // if the model's file has none; the API's 1 is high for small models
const SCHEMA = '{\n  "type": "object",\n  "properties": {\n    "answer": { "type": "string" }\n  },\n  "required": ["answer"]\n}';

export class Settings {
  constructor() {
    /** @type {Record<string, string>} */
    this.values = {};
    this.dialog = byId("settings", HTMLDialogElement);
    /** @type {Record<string, HTMLInputElement>} */
    this.inputs = {};
    this.system = byId("system", HTMLTextAreaElement);
    this.format = byId("format", HTMLSelectElement);
    this.schema = byId("schema", HTMLTextAreaElement);
    this.logprobs = byId("logprobs", HTMLInputElement);
    /** @type {Record<string, unknown>} */
    this.own = {}; // what this page asks for where its user says nothing
    this.make();
    this.load();
    this.dialog.addEventListener("input", () => this.save());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside it
    });
    byId("open-settings").addEventListener("click", () => this.dialog.showModal());
    byId("reset").addEventListener("click", () => {
      local.set(STORE, null);
      this.load();
      this.save();
    });
  }

  make() {
    const rows = SAMPLERS.map(({ name, label, hint, min, max, step }) => {
      const id = `set-${name}`;
      const mode = step === "1" ? "numeric" : "decimal";
      const input = /** @type {HTMLInputElement} */ (
        el("input", { type: "number", id, min, max, step, inputmode: mode, "aria-describedby": `${id}-hint` })
      );
      this.inputs[name] = input;
      const words = el("label", { for: id }, label, el("span", { class: "note", id: `${id}-hint` }, hint));
      return el("div", { class: "setting" }, words, input);
    });
    const stop = /** @type {HTMLInputElement} */ (el("input", { type: "text", id: "set-stop", spellcheck: "false" }));
    this.inputs.stop = stop;
    const words = el("label", { for: "set-stop" }, "Stop at", el("span", { class: "note" }, "this text ends an answer"));
    byId("samplers").append(...rows, el("div", { class: "setting" }, words, stop));
    this.format.append(...FORMATS.map(({ name, label }) => el("option", { value: name }, label)));
  }

  load() {
    /** @type {Record<string, any>} */
    let found = {};
    try {
      found = JSON.parse(local.get(STORE) ?? "{}");
    } catch {
      // not written by this page
    }
    for (const [name, input] of Object.entries(this.inputs)) input.value = String(found[name] ?? "");
    this.system.value = String(found.system ?? "");
    this.format.value = FORMATS.some(({ name }) => name === found.format) ? found.format : "text";
    this.schema.value = String(found.schema ?? SCHEMA);
    this.logprobs.checked = found.logprobs === true;
    this.showSchema();
  }

  save() {
    /** @type {Record<string, unknown>} */
    const kept = {};
    for (const [name, input] of Object.entries(this.inputs)) if (input.value !== "") kept[name] = input.value;
    kept.system = this.system.value;
    kept.format = this.format.value;
    if (this.schema.value !== SCHEMA) kept.schema = this.schema.value;
    kept.logprobs = this.logprobs.checked;
    local.set(STORE, JSON.stringify(kept));
    this.showSchema();
  }

  showSchema() {
    const wanted = this.format.value === "json_schema";
    byId("schema-label").hidden = this.schema.hidden = !wanted;
    const note = byId("schema-note");
    note.textContent = wanted ? (this.schemaError() ?? "") : "";
    note.hidden = note.textContent === "";
  }

  schemaError() {
    try {
      JSON.parse(this.schema.value);
      return null;
    } catch (error) {
      return `This is not JSON: ${/** @type {Error} */ (error).message}`;
    }
  }

  /**
   * Ask the server for its defaults and for the response formats that it can enforce.
   * @param {string} model
   */
  async ask(model) {
    const body = { model, messages: [{ role: "user", content: "?" }] };
    try {
      const { settings } = await call("/v1/explain", body);
      for (const [name, input] of Object.entries(this.inputs)) {
        const found = settings[name];
        if (name === "temperature" && found?.origin === "default") {
          this.own = { temperature: TEMPERATURE };
          input.placeholder = String(TEMPERATURE);
          continue;
        }
        const shown = found && found.value !== null && !Array.isArray(found.value) && !["seed", "max_tokens"].includes(name);
        input.placeholder = shown ? `${found.value}` : "";
        if (shown && found.origin !== "default") input.title = `${found.value}, from the ${found.origin}`;
      }
    } catch {
      // perhaps no chat template: the first message will show the reason
    }
    const schema = { name: "answer", schema: { type: "object" } };
    const forms = [{ type: "json_object" }, { type: "json_schema", json_schema: schema }];
    const honoured = await Promise.all(
      forms.map(async (form) => {
        const messages = [{ role: "user", content: "Answer in JSON." }];
        return call("/v1/explain", { model, messages, response_format: form }).then(() => true, () => false);
      }),
    );
    const options = [...this.format.options].slice(1);
    options.forEach((option, place) => (option.disabled = option.hidden = !honoured[place]));
    if (this.format.selectedOptions[0]?.disabled) this.format.value = "text";
    byId("formats").hidden = !honoured.some(Boolean);
    this.showSchema();
  }

  /** The fields of a request; throws for a wrong value. */
  fields() {
    /** @type {Record<string, unknown>} */
    const found = { ...this.own };
    for (const { name, label } of SAMPLERS) {
      const input = this.inputs[name];
      if (!input.checkValidity()) throw new Error(`${label}: ${input.validationMessage}`);
      if (input.value !== "") found[name] = input.valueAsNumber;
    }
    if (this.inputs.stop.value !== "") found.stop = [this.inputs.stop.value];
    if (this.format.value === "json_object") found.response_format = { type: "json_object" };
    if (this.format.value === "json_schema") {
      const error = this.schemaError();
      if (error !== null) throw new Error(`JSON Schema: ${error}`);
      const schema = { name: "answer", strict: true, schema: JSON.parse(this.schema.value) };
      found.response_format = { type: "json_schema", json_schema: schema };
    }
    if (this.logprobs.checked) Object.assign(found, { logprobs: true, top_logprobs: 5 });
    return found;
  }
}
