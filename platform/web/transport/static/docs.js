// @ts-check
/** Draws `/openapi.json`. Nothing is loaded from elsewhere: no validator, no fonts. */

/** Swagger UI has a link within each operation's button, and parts outside of landmarks and heading levels. @param {{React: any}} system */
const accessible = ({ React }) => ({
  components: { DeepLink: (/** @type {{text: string}} */ { text }) => React.createElement("span", null, text) },
  wrapComponents: {
    InfoContainer: (/** @type {any} */ Info) => (/** @type {any} */ props) => React.createElement("section", { "aria-label": "About this API" }, React.createElement(Info, props)),
    operations: (/** @type {any} */ Operations) => (/** @type {any} */ props) =>
      React.createElement("section", null, React.createElement("h2", null, "Operations"), React.createElement(Operations, props)),
  },
});

SwaggerUIBundle({ dom_id: "#docs", url: "/openapi.json", validatorUrl: null, deepLinking: true, defaultModelsExpandDepth: 0, plugins: [accessible] });
