-- What gateways do to budgets that they share: one batch of one gateway, all of it or nothing.
--
-- The arithmetic is that of headway/policy/admission/quota.py, in units times microseconds of a minute, which doubles
-- have exactly. The clock is this server's.
--
-- KEYS: budgets (hash: tenant -> two meters), leases (sorted set: gateway -> the end of its lease),
--       this gateway's open reservations (hash: number -> tenant, tokens), its last batch (number, reply)
-- ARGV: name of the gateway, number of the batch, length of a lease in microseconds, operations as MessagePack:
--       {"reserve", number, tenant, tokens, requests a minute, tokens a minute, and both of all tenants}
--       {"settle", number, tenant, tokens used, or -1 for a request that has failed}
--       {"use", tenant, requests, tokens}, of which nothing was reserved
-- Reply: {time, results, meters}: for each reservation {} or what refuses it, {scope, unit, left, wait}; and the two
--       meters of each tenant that was touched, after its name.

local MINUTE = 60000000
local LIMIT, LEVEL, AT, RESERVED, SETTLED, REFUNDED = 1, 2, 3, 4, 5, 6
local budgets, leases, open, last = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local gateway, batch, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local before = redis.call('GET', last)
if before then
  before = cmsgpack.unpack(before)
  if before[1] >= batch then return before[2] end -- its answer was lost on the way
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local touched = {}

local function meters_of(tenant)
  if not touched[tenant] then
    local kept = redis.call('HGET', budgets, tenant)
    touched[tenant] = kept and cmsgpack.unpack(kept) or { { 0, 0, 0, 0, 0, 0 }, { 0, 0, 0, 0, 0, 0 } }
  end
  return touched[tenant]
end

local function level_at(meter)
  return math.min(meter[LIMIT] * MINUTE, meter[LEVEL] + meter[LIMIT] * math.max(0, now - meter[AT]))
end

local function set_limit(meter, limit)
  if meter[LIMIT] == limit then return end
  local level, full = level_at(meter), limit * MINUTE
  if meter[LIMIT] == 0 then level = full
  elseif limit > meter[LIMIT] then level = full - (meter[LIMIT] * MINUTE - level)
  else level = math.min(full, level) end
  meter[LIMIT], meter[LEVEL], meter[AT] = limit, level, now
end

local function add(meter, count)
  if meter[LIMIT] > 0 then
    meter[LEVEL] = math.min(meter[LIMIT] * MINUTE, level_at(meter) + count * MINUTE)
    meter[AT] = math.max(now, meter[AT])
  end
end

local function reserve(meter, count)
  meter[RESERVED] = meter[RESERVED] + count
  add(meter, -count)
end

local function settle(meter, reserved, used)
  meter[RESERVED] = meter[RESERVED] + math.max(0, used - reserved)
  meter[SETTLED] = meter[SETTLED] + used
  meter[REFUNDED] = meter[REFUNDED] + math.max(0, reserved - used)
  add(meter, reserved - used)
end

local function settle_all(tenant, reserved_requests, reserved_tokens, requests, tokens)
  for _, scope in ipairs({ tenant, '' }) do
    local meters = meters_of(scope)
    settle(meters[1], reserved_requests, requests)
    settle(meters[2], reserved_tokens, tokens)
  end
end

local function wait_of(meter, asked)
  local missing = asked * MINUTE - level_at(meter)
  if meter[LIMIT] == 0 or missing <= 0 then return 0 end
  local whole = math.floor(missing / meter[LIMIT])
  return whole * meter[LIMIT] < missing and whole + 1 or whole
end

local does = {}

does['reserve'] = function(op)
  local number, tenant, tokens = op[2], op[3], op[4]
  local of_tenant, of_all = meters_of(tenant), meters_of('')
  local limits = { { of_tenant, op[5], op[6] }, { of_all, op[7], op[8] } }
  for _, each in ipairs(limits) do
    set_limit(each[1][1], each[2])
    set_limit(each[1][2], each[3])
  end
  local longest, refusal = 0, {}
  for scope, each in ipairs(limits) do
    for unit, asked in ipairs({ 1, tokens }) do
      local wait = wait_of(each[1][unit], asked)
      if wait > longest then
        longest = wait
        refusal = { scope, unit, math.max(0, math.floor(level_at(each[1][unit]) / MINUTE)), wait }
      end
    end
  end
  if longest == 0 then
    for _, each in ipairs(limits) do
      reserve(each[1][1], 1)
      reserve(each[1][2], tokens)
    end
    redis.call('HSET', open, number, cmsgpack.pack({ tenant, tokens }))
  end
  return refusal
end

does['settle'] = function(op)
  local number, tenant, used = op[2], op[3], op[4]
  local requests, tokens = used < 0 and 0 or 1, math.max(0, used)
  local kept = redis.call('HGET', open, number)
  if kept then
    redis.call('HDEL', open, number)
    settle_all(tenant, 1, cmsgpack.unpack(kept)[2], requests, tokens)
  else -- its lease has ended, or it was let in while nobody could be asked
    settle_all(tenant, 0, 0, requests, tokens)
  end
end

does['use'] = function(op) settle_all(op[2], 0, 0, op[3], op[4]) end

-- What gateways had reserved that have died, or were not heard of for the length of a lease, is refunded.
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 8)) do
  local of_dead = string.sub(open, 1, -1 - string.len(gateway)) .. dead
  for _, packed in ipairs(redis.call('HVALS', of_dead)) do
    local kept = cmsgpack.unpack(packed)
    settle_all(kept[1], 1, kept[2], 0, 0)
  end
  redis.call('DEL', of_dead)
  redis.call('ZREM', leases, dead)
end

local results = {}
for _, op in ipairs(cmsgpack.unpack(ARGV[4])) do
  local result = does[op[1]](op)
  if result then results[#results + 1] = result end
end

redis.call('ZADD', leases, now + lease, gateway)
local states = {}
for tenant, meters in pairs(touched) do
  redis.call('HSET', budgets, tenant, cmsgpack.pack(meters))
  states[#states + 1] = { tenant, meters[1], meters[2] }
end
local reply = { now, results, states }
redis.call('SET', last, cmsgpack.pack({ batch, reply }), 'EX', 86400)
return reply
