// @ts-check
/** Draws `/openapi.json`. Nothing is loaded from elsewhere: no validator, no fonts. */

SwaggerUIBundle({ dom_id: "#docs", url: "/openapi.json", validatorUrl: null, deepLinking: true, defaultModelsExpandDepth: 0 });
