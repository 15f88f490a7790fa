# Read by infra/deploy and infra/worker: settings of Prefect's client, and a check that a server answers.
bin=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
export PREFECT_API_URL="${PREFECT_API_URL:-http://127.0.0.1:4200/api}"
export PREFECT_HOME="${PREFECT_HOME:-$PWD/.enginesmith/prefect}"
export PREFECT_SERVER_ANALYTICS_ENABLED=false PREFECT_CLI_PROMPT=false DO_NOT_TRACK=true
PATH="$bin:$PATH"
mkdir -p "$PREFECT_HOME"

fail() {
    echo "error: $1" >&2
    exit 2
}

[ -x "$bin/prefect" ] || fail "no prefect in $bin; run \`make setup\`"
"$bin/python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/health", timeout=10)' \
    "${PREFECT_API_URL%/}" 2>/dev/null ||
    fail "no Prefect server answers at $PREFECT_API_URL; start one with \`make server\`, or set PREFECT_API_URL"
