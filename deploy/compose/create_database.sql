-- Run once by the image of PostgreSQL, as the superuser. The server's role owns its database and nothing else; it may take the three
-- roles that row-level security binds.
\set password `cat /run/secrets/postgres_server`
CREATE ROLE app_tenant NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS;
CREATE ROLE app_operator NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS;
CREATE ROLE app_writer NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS;
CREATE ROLE loraplex_server LOGIN NOINHERIT NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS PASSWORD :'password';
GRANT app_tenant, app_operator, app_writer TO loraplex_server;
CREATE DATABASE loraplex OWNER loraplex_server;
REVOKE CONNECT ON DATABASE loraplex FROM PUBLIC;
