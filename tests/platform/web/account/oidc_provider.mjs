// A certified OpenID Connect provider (npm: oidc-provider) with one client and one person, for the tests.
// Arguments: client id, client secret, redirect address. Prints its issuer when it listens.
import { createServer } from "node:http";
import Provider from "oidc-provider";

const [clientId, clientSecret, redirectUri] = process.argv.slice(2);
const server = createServer((request, response) => handle(request, response));
let handle = (_, response) => response.end();

server.listen(0, "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients: [{ client_id: clientId, client_secret: clientSecret, redirect_uris: [redirectUri] }],
    claims: { email: ["email", "email_verified"], profile: ["name"] },
    findAccount: (_, sub) => ({
      accountId: sub,
      claims: () => ({ sub, email: `${sub}@example.com`, email_verified: true, name: sub }),
    }),
    pkce: { required: () => true },
    cookies: { keys: ["a key of these tests"] },
  });
  handle = provider.callback();
  console.log(issuer);
});
