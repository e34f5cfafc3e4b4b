// Sends the forms of the page and shows the responses, also those that are streams. Paths are
// relative to the page, so that it also works behind a proxy that adds a prefix.
const url = path => new URL("./" + path.slice(1), document.baseURI);
async function send(form) {
  const result = form.querySelector(".result"), body = form.querySelector("textarea");
  const query = new URLSearchParams();
  let path = form.dataset.path;
  for (const input of form.querySelectorAll("input")) {
    if (input.dataset.in === "path") path = path.replace("{" + input.name + "}", encodeURIComponent(input.value));
    else if (input.value) query.set(input.name, input.value);
  }
  const options = {method: form.dataset.method};
  if (body && body.value.trim()) {
    options.body = body.value;
    options.headers = {"Content-Type": "application/json"};
  }
  result.textContent = "Waiting for the response.";
  try {
    const started = performance.now(), target = url(path);
    target.search = query;
    const response = await fetch(target, options);
    const head = () => response.status + " in " + Math.round(performance.now() - started) + " ms\n\n";
    const reader = response.body.getReader(), decoder = new TextDecoder();
    let text = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      text += decoder.decode(part.value, {stream: true});
      result.textContent = head() + text;
    }
    const isJson = (response.headers.get("content-type") || "").startsWith("application/json");
    result.textContent = head() + (isJson ? JSON.stringify(JSON.parse(text), null, 2) : text);
  } catch (error) {
    result.textContent = "The request failed: " + error;
  }
}
for (const form of document.querySelectorAll("form"))
  form.addEventListener("submit", event => { event.preventDefault(); send(form); });
fetch(url("/v1/models")).then(response => response.json()).then(models => {
  for (const input of document.querySelectorAll("[name=model_id],[name=model_name]")) input.value = models.data[0].id;
  for (const input of document.querySelectorAll("[name=model_version]")) input.value = "1";
}).catch(() => {});
