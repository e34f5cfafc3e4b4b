// Shows the OpenAPI document with Swagger UI. Paths are relative to the page, so that it also works
// behind a proxy that adds a prefix.
async function show() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`openapi.json has status ${response.status}`);
  const server = new URL(".", document.baseURI).href.replace(/\/$/, "");
  SwaggerUIBundle({
    spec: {...await response.json(), servers: [{url: server}]},
    dom_id: "#swagger-ui",
    deepLinking: true, // the address names the operation that is shown
    defaultModelsExpandDepth: -1, // schemas are shown in the operations
    displayRequestDuration: true,
    syntaxHighlight: false, // it takes long for attention maps
    tryItOutEnabled: true,
    validatorUrl: null, // no request to another host
  });
}
show().catch(error => { document.getElementById("swagger-ui").textContent = `The page cannot be shown: ${error}`; });
