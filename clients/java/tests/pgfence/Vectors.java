package pgfence;

import com.google.gson.*;

import org.junit.jupiter.api.Test;

import pgfence.LeaseStates.*;

import java.io.IOException;
import java.lang.reflect.Field;
import java.nio.file.*;
import java.util.*;
import java.util.function.*;
import java.util.stream.*;

/** Plays clients/spec/vectors, whose format is in clients/spec/README.md. */
final class Vectors {
    private static final JsonElement NULL = JsonNull.INSTANCE;

    private LeaseStates states;
    private LeadState leader;
    private long jitter, calls;

    @Test
    void theyHold() throws IOException {
        Path directory = Path.of(System.getenv().getOrDefault("VECTORS", "../spec/vectors"));
        int count = 0;
        List<String> failures = new ArrayList<>();
        try (DirectoryStream<Path> files = Files.newDirectoryStream(directory, "*.json")) {
            for (Path file : files) {
                for (JsonElement one :
                        JsonParser.parseString(Files.readString(file)).getAsJsonArray()) {
                    JsonObject vector = one.getAsJsonObject();
                    count++;
                    try {
                        new Vectors().play(vector);
                    } catch (RuntimeException | AssertionError error) {
                        failures.add(file.getFileName() + ": " + vector.get("name") + ": " + error);
                    }
                }
            }
        }
        String all = String.join("\n", failures);
        check(count > 0 && failures.isEmpty(), () -> "in " + directory + " are wrong: " + all);
    }

    private void play(JsonObject vector) {
        jitter = number(vector, "jitter", 0);
        states = new LeaseStates(jitter);
        for (JsonElement one : vector.getAsJsonArray("steps")) {
            JsonObject step = one.getAsJsonObject();
            long at = number(step, "at", 0);
            Map.Entry<String, JsonElement> in =
                    step.getAsJsonObject("in").entrySet().iterator().next();
            List<Effect> effects = input(at, in.getKey(), in.getValue().getAsJsonObject());
            JsonArray out = step.has("out") ? step.getAsJsonArray("out") : new JsonArray();
            List<JsonObject> actual = effects.stream().map(Vectors::fields).toList();
            calls += actual.stream().filter(effect -> effect.has("call")).count();
            boolean isLike =
                    actual.size() == out.size()
                            && IntStream.range(0, actual.size())
                                    .allMatch(
                                            i ->
                                                    hasFields(
                                                            actual.get(i),
                                                            out.get(i).getAsJsonObject()));
            check(isLike, () -> "at " + at + " " + actual + " instead of " + out);
            checkEach(step, "held", key -> new JsonPrimitive(states.remaining(at, key) > 0));
            checkEach(step, "deadline", key -> new JsonPrimitive(states.lease(key).deadline));
            checkEach(step, "next_beat", key -> new JsonPrimitive(states.lease(key).dueAt));
            long wake = Math.min(states.wake(at), 1L << 53), expected = number(step, "wake", wake);
            check(wake == expected, () -> "at " + at + " wake is " + wake + ", not " + expected);
        }
    }

    private List<Effect> input(long at, String what, JsonObject args) {
        if (what.equals("nothing")) {
            return List.of();
        }
        if (what.equals("lead")) {
            return leadInput(at, args);
        }
        if (what.equals("guard_failed")) {
            return List.of(guardFailed(args));
        }
        int call = (int) number(args, "call", 0);
        check(call <= calls, () -> "at " + at + " call " + call + " was never sent");
        return states.step(
                at,
                what.matches("answer|failed|sent") ? call : 0,
                () -> {
                    String key = text(args, "key"), id = text(args, "id");
                    switch (what) {
                        case "acquire" ->
                                states.acquire(id, strings(args, "names"), options(args), null, 0);
                        case "keep_row" ->
                                states.acquire(
                                        id,
                                        List.of(key),
                                        options(args),
                                        text(args, "table"),
                                        number(args, "token", 0));
                        case "give_up" -> states.giveUp(id);
                        case "release" -> states.release(key);
                        case "check" -> states.effects.add(checked(at, key));
                        case "last_transaction" ->
                                states.lastTransaction(strings(args, "keys"), text(args, "stage"));
                        case "row_locked" -> states.rowLocked(key);
                        case "row_unlocked" -> states.rowUnlocked(key);
                        case "suspect" -> states.suspect(strings(args, "keys"));
                        case "close" -> states.close();
                        case "heartbeat_died" -> states.heartbeatDied();
                        case "sent" -> states.sent(call);
                        case "answer" -> states.answered(call, answer(args));
                        case "failed" ->
                                states.failed(call, text(args, "code"), is(args, "broken"));
                        case "disconnected" ->
                                states.disconnected((int) number(args, "connection", 0));
                        case "tick" -> {}
                        default -> throw new AssertionError("there is no input " + what);
                    }
                });
    }

    /** Returns the reply to a check, which is no input of the machine. */
    private Reply checked(long at, String key) {
        LeaseState lease = states.lease(key);
        Reply reply = new Reply(states.remaining(at, key) > 0 ? null : "LeaseLost");
        reply.reply = key;
        if (reply.error != null) {
            boolean isLost = lease != null && lease.state == State.LOST;
            FenceException.Reason late = FenceException.Reason.DEADLINE;
            FenceException.Reason other =
                    states.isOver(at, key) ? late : FenceException.Reason.RELEASED;
            reply.reason = isLost ? lease.reason : other;
            reply.advice = isLost ? lease.advice : null;
        }
        return reply;
    }

    private static Options options(JsonObject args) {
        Options options = new Options();
        options.ttl = number(args, "ttl", 0);
        options.wait = number(args, "wait", 0);
        options.holder = text(args, "holder");
        options.isHolderUnique = !args.has("table") && !is(args, "named");
        options.reclaim = is(args, "reclaim");
        options.session = is(args, "session");
        options.shared = is(args, "shared");
        options.atMost = number(args, "at_most", LeaseStates.NEVER);
        return options;
    }

    /** Reads an answer. The statement is not known here, so a row is read as all that it can be. */
    private static Answer answer(JsonObject args) {
        Long number = null;
        Taken taken = null;
        List<Outcome> outcomes = new ArrayList<>();
        if (args.has("taken")) {
            JsonObject by = args.getAsJsonObject("taken");
            taken = new Taken(text(by, "holder"), number(by, "remaining", 0), text(by, "state"));
        }
        for (JsonElement row :
                expand(args.has("rows") ? args.getAsJsonArray("rows") : new JsonArray())) {
            if (!row.isJsonArray()) {
                number = row.isJsonNull() ? null : (Long) row.getAsLong();
                outcomes.add(new Outcome(number != null));
                continue;
            }
            List<JsonElement> columns = new ArrayList<>(row.getAsJsonArray().asList());
            columns.addAll(Collections.nCopies(3, NULL));
            if (columns.get(0).isJsonArray()) {
                number = columns.get(1).getAsLong();
                continue;
            }
            String code = columns.get(3).isJsonNull() ? null : columns.get(3).getAsString();
            long remaining = span(columns.get(1)), again = span(columns.get(2));
            outcomes.add(new Outcome(columns.get(0).getAsString(), remaining, again, code));
        }
        return new Answer(number, taken, outcomes);
    }

    private List<Effect> leadInput(long at, JsonObject args) {
        String error = text(args, "error", ""), code = text(args, "code", "");
        return switch (text(args, "what")) {
            case "start" -> {
                leader = new LeadState(number(args, "ttl", 0), jitter);
                yield List.of();
            }
            case "granted" -> {
                leader.granted(at);
                yield List.of();
            }
            case "failed" -> {
                boolean isStopped = is(args, "stopped"), isClosed = is(args, "closed");
                yield leader.failed(at, error, code, is(args, "lost"), isStopped, isClosed);
            }
            default -> throw new AssertionError("there is no such step of a leader: " + args);
        };
    }

    private static Effect guardFailed(JsonObject args) {
        return LeaseStates.guardFailed(
                Stage.valueOf(text(args, "stage").toUpperCase(Locale.ROOT)),
                text(args, "code"),
                is(args, "is_fatal"),
                text(args, "session", "open"),
                text(args, "of", "names"),
                is(args, "is_inner"),
                is(args, "is_lost"));
    }

    // Comparing effects.

    /** The fields of effects that have another name in the specification. */
    private static final Map<String, String> FIELD_NAMES =
            Map.of(
                    "verb", "do",
                    "number", "call",
                    "requestKey", "for",
                    "inDoubt", "in_doubt",
                    "waitsFor", "waits_for",
                    "hangUp", "hang_up");

    private static JsonObject fields(Effect effect) {
        JsonObject fields = new JsonObject();
        for (Field field : effect.getClass().getDeclaredFields()) {
            field.setAccessible(true);
            try {
                String name = FIELD_NAMES.getOrDefault(field.getName(), field.getName());
                fields.add(name, new Gson().toJsonTree(plain(field.get(effect))));
            } catch (IllegalAccessException never) {
                throw new AssertionError(never);
            }
        }
        return fields;
    }

    private static Object plain(Object value) {
        if (value instanceof List<?> list) {
            return list.stream().map(Vectors::plain).toList();
        }
        boolean isPlain = value == null || value instanceof Number || value instanceof Boolean;
        return isPlain ? value : value.toString();
    }

    /** Returns true if all expected fields are equal. A missing field is 0, false or empty. */
    private static boolean hasFields(JsonObject actual, JsonObject expected) {
        return expected.keySet().stream()
                .allMatch(
                        key -> isLike(actual.has(key) ? actual.get(key) : NULL, expected.get(key)));
    }

    private static boolean isLike(JsonElement actual, JsonElement expected) {
        List<JsonElement> list =
                actual.isJsonArray() ? actual.getAsJsonArray().asList() : List.of();
        if (expected.isJsonObject()) {
            return list.size() == number(expected.getAsJsonObject(), "length", -1);
        }
        if (expected.isJsonArray()) {
            return list.equals(expand(expected.getAsJsonArray()));
        }
        return actual.equals(expected)
                || actual.isJsonNull() && expected.getAsString().matches("0|false|");
    }

    /** Writes out the shorthands of a list. */
    private static List<JsonElement> expand(JsonArray list) {
        List<JsonElement> expanded = new ArrayList<>();
        for (JsonElement one : list) {
            JsonObject shorthand = one.isJsonObject() ? one.getAsJsonObject() : new JsonObject();
            for (int i = 0; i < number(shorthand, "count", 1); i++) {
                JsonElement name = new JsonPrimitive(text(shorthand, "prefix") + i);
                JsonElement written = shorthand.has("each") ? shorthand.get("each") : name;
                expanded.add(shorthand.has("count") ? written : one);
            }
        }
        return expanded;
    }

    /** Checks a value of each lease that the step names under {@code field}. */
    private static void checkEach(
            JsonObject step, String field, Function<String, JsonElement> valueOf) {
        if (!step.has(field)) {
            return;
        }
        for (Map.Entry<String, JsonElement> lease : step.getAsJsonObject(field).entrySet()) {
            JsonElement actual = valueOf.apply(lease.getKey()), expected = lease.getValue();
            String where = "at " + step.get("at") + " " + field + " of " + lease.getKey();
            check(actual.equals(expected), () -> where + " is " + actual + ", not " + expected);
        }
    }

    private static void check(boolean holds, Supplier<String> message) {
        if (!holds) {
            throw new AssertionError(message.get());
        }
    }

    private static long number(JsonObject object, String key, long ifMissing) {
        return object.has(key) ? object.get(key).getAsLong() : ifMissing;
    }

    private static long span(JsonElement value) {
        return value.isJsonNull() ? -1 : value.getAsLong();
    }

    private static String text(JsonObject object, String key) {
        return text(object, key, null);
    }

    private static String text(JsonObject object, String key, String ifMissing) {
        return object.has(key) ? object.get(key).getAsString() : ifMissing;
    }

    private static boolean is(JsonObject object, String key) {
        return object.has(key) && object.get(key).getAsBoolean();
    }

    private static List<String> strings(JsonObject object, String key) {
        return expand(object.getAsJsonArray(key)).stream().map(JsonElement::getAsString).toList();
    }
}
