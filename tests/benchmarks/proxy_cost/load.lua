-- For wrk, with one thread: the same POST again and again. Behind `--` come a file with the body, a file
-- with headers (one `name: value` a line), and how many requests to send in all; 0 is as many as there is time
-- for. With the last answer it says so and waits to be interrupted. At the end it writes one line of JSON.

local requests_max = 0
local sent = 0
local answered = 0
local LONG_MS = 3600 * 1000

function init(args)
  wrk.method = "POST"
  local body = assert(io.open(args[1], "rb"))
  wrk.body = body:read("*a")
  body:close()
  wrk.headers["content-type"] = "application/json"
  for line in io.lines(args[2]) do
    local name, value = line:match("^([^:]+): (.*)$")
    wrk.headers[name] = value
  end
  requests_max = tonumber(args[3])
  if requests_max == 0 then -- as globals these are calls from wrk for every request
    delay, response = nil, nil
  end
end

function delay()
  sent = sent + 1
  return sent > requests_max and LONG_MS or 0
end

function response()
  answered = answered + 1
  if answered == requests_max then
    io.write("all answered\n")
    io.flush()
    wrk.thread:stop()
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\n{"responses": %d, "seconds": %.6f, "status_errors": %d, "connection_errors": %d, "timeouts": %d}\n',
    summary.requests, summary.duration / 1e6,
    errors.status, errors.connect + errors.read + errors.write, errors.timeout
  ))
end
