#!/bin/sh
# Writes the secrets of compose.yaml into the folder `secrets` beside this script, or into $1. Existing ones stay as they are.
set -eu
umask 077
folder="${1:-$(dirname "$0")/secrets}"
mkdir -p "$folder"

random() { od -An -N 32 -tx1 /dev/urandom | tr -d ' \n'; }

# Containers read them under their own users: only this folder keeps others out.
write() {
    [ -e "$folder/$1" ] && return
    cat >"$folder/$1.new"
    chmod 0444 "$folder/$1.new"
    mv "$folder/$1.new" "$folder/$1"
}

random | write postgres_superuser
random | write postgres_server
random | write grafana_admin
printf 'requirepass %s\n' "$(random)" | write valkey_auth
write loraplex.toml <<EOF
database_url = "postgresql://loraplex_server:$(cat "$folder/postgres_server")@postgres:5432/loraplex"
redis_url = "redis://:$(sed 's/requirepass //' "$folder/valkey_auth")@valkey:6379/0"
secret = "$(random)"
EOF
echo "secrets are in $folder: keep a copy of loraplex.toml, without its \`secret\` sealed data cannot be read"
