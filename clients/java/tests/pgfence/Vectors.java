package pgfence;

import com.google.gson.*;

import org.junit.jupiter.api.Test;

import pgfence.LeaseState.*;

import java.io.IOException;
import java.lang.reflect.Field;
import java.nio.file.*;
import java.util.*;
import java.util.function.*;
import java.util.stream.*;

/** Plays clients/spec/vectors, whose format is in clients/spec/README.md. */
final class Vectors {
    private static final JsonElement NOTHING = JsonNull.INSTANCE;

    private LeaseState states;
    private Leader leader;
    private long jitter, calls;

    @Test
    void theyHold() throws IOException {
        Path directory = Path.of(System.getenv().getOrDefault("VECTORS", "../spec/vectors"));
        int count = 0;
        List<String> wrong = new ArrayList<>();
        try (DirectoryStream<Path> files = Files.newDirectoryStream(directory, "*.json")) {
            for (Path file : files) {
                for (JsonElement one :
                        JsonParser.parseString(Files.readString(file)).getAsJsonArray()) {
                    JsonObject vector = one.getAsJsonObject();
                    count++;
                    try {
                        new Vectors().play(vector);
                    } catch (RuntimeException | AssertionError error) {
                        wrong.add(file.getFileName() + ": " + vector.get("name") + ": " + error);
                    }
                }
            }
        }
        String all = String.join("\n", wrong);
        check(count > 0 && wrong.isEmpty(), () -> "in " + directory + " are wrong: " + all);
    }

    private void play(JsonObject vector) {
        jitter = number(vector, "jitter", 0);
        states = new LeaseState(jitter);
        for (JsonElement one : vector.getAsJsonArray("steps")) {
            JsonObject step = one.getAsJsonObject();
            long at = number(step, "at", 0);
            Map.Entry<String, JsonElement> in =
                    step.getAsJsonObject("in").entrySet().iterator().next();
            List<Effect> effects = input(at, in.getKey(), in.getValue().getAsJsonObject());
            JsonArray out = step.has("out") ? step.getAsJsonArray("out") : new JsonArray();
            List<JsonObject> are = effects.stream().map(Vectors::fields).toList();
            calls += are.stream().filter(effect -> effect.has("call")).count();
            boolean isLike =
                    are.size() == out.size()
                            && IntStream.range(0, are.size())
                                    .allMatch(
                                            i ->
                                                    isLikeAll(
                                                            are.get(i),
                                                            out.get(i).getAsJsonObject()));
            check(isLike, () -> "at " + at + " " + are + " instead of " + out);
            each(step, "held", key -> new JsonPrimitive(states.remaining(at, key) > 0));
            each(step, "deadline", key -> new JsonPrimitive(states.grant(key).deadline));
            each(step, "next_beat", key -> new JsonPrimitive(states.grant(key).at));
            long wake = Math.min(states.wake(at), 1L << 53), should = number(step, "wake", wake);
            check(wake == should, () -> "at " + at + " wake is " + wake + ", not " + should);
        }
    }

    private List<Effect> input(long at, String what, JsonObject with) {
        if (what.equals("nothing")) {
            return List.of();
        }
        if (what.equals("lead")) {
            return leads(at, with);
        }
        int call = (int) number(with, "call", 0);
        check(call <= calls, () -> "at " + at + " call " + call + " was never sent");
        return states.step(
                at,
                what.matches("answer|failed|sent") ? call : 0,
                () -> {
                    String key = text(with, "key"), id = text(with, "id");
                    switch (what) {
                        case "acquire" -> states.acquire(id, strings(with, "names"), asked(with));
                        case "keep_row" ->
                                states.keepRow(
                                        id,
                                        key,
                                        asked(with),
                                        text(with, "table"),
                                        number(with, "token", 0));
                        case "give_up" -> states.giveUp(id);
                        case "release" -> states.release(key);
                        case "check" -> states.check(key);
                        case "last_transaction" -> states.last(strings(with, "keys"), text(with, "stage"));
                        case "row_locked" -> states.touches(key);
                        case "row_unlocked" -> states.ended(key);
                        case "suspect" -> states.suspect(strings(with, "keys"));
                        case "close" -> states.close();
                        case "heartbeat_died" -> states.died();
                        case "sent" -> states.sent(call);
                        case "answer" -> states.answered(call, answer(with));
                        case "failed" ->
                                states.failed(call, text(with, "code"), is(with, "broken"));
                        case "disconnected" -> states.disconnected((int) number(with, "connection", 0));
                        case "tick" -> {}
                        default -> throw new AssertionError("there is no input " + what);
                    }
                });
    }

    private static Options asked(JsonObject with) {
        Options asked = new Options();
        asked.ttl = number(with, "ttl", 0);
        asked.wait = number(with, "wait", 0);
        asked.holder = text(with, "holder");
        asked.isOwnHolder = !with.has("table") && !is(with, "named");
        asked.reclaim = is(with, "reclaim");
        asked.session = is(with, "session");
        asked.shared = is(with, "shared");
        asked.atMost = number(with, "at_most", LeaseState.NEVER);
        return asked;
    }

    /** The rows are those of some statement: each is read as all that it can be. */
    private static Answer answer(JsonObject with) {
        Long number = null;
        Taken taken = null;
        List<Outcome> outcomes = new ArrayList<>();
        if (with.has("taken")) {
            JsonObject by = with.getAsJsonObject("taken");
            taken = new Taken(text(by, "holder"), number(by, "remaining", 0), text(by, "state"));
        }
        for (JsonElement row :
                all(with.has("rows") ? with.getAsJsonArray("rows") : new JsonArray())) {
            if (!row.isJsonArray()) {
                number = row.isJsonNull() ? null : (Long) row.getAsLong();
                outcomes.add(new Outcome(number != null));
                continue;
            }
            List<JsonElement> columns = new ArrayList<>(row.getAsJsonArray().asList());
            columns.addAll(Collections.nCopies(3, NOTHING));
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

    private List<Effect> leads(long at, JsonObject with) {
        String cause = text(with, "cause");
        return switch (text(with, "what")) {
            case "start" -> (leader = new Leader(number(with, "ttl", 0), jitter)).start();
            case "granted" -> leader.granted(at);
            case "work done" -> leader.workDone();
            case "work failed" -> leader.workFailed(at, cause, is(with, "lost"));
            case "not granted" -> leader.notGranted(at, cause);
            case "stop" -> leader.stop();
            case "tick" -> leader.tick(at);
            default -> throw new AssertionError("there is no such step of a leader: " + with);
        };
    }

    // What is, and what should be

    /** By the names of the specification. */
    private static final Map<String, String> WORDS =
            Map.of(
                    "verb", "do",
                    "asker", "for",
                    "inDoubt", "in_doubt",
                    "waitsFor", "waits_for",
                    "hangUp", "hang_up");

    private static JsonObject fields(Effect effect) {
        JsonObject fields = new JsonObject();
        for (Field field : effect.getClass().getDeclaredFields()) {
            field.setAccessible(true);
            try {
                String name = WORDS.getOrDefault(field.getName(), field.getName());
                fields.add(name, new Gson().toJsonTree(plain(field.get(effect))));
            } catch (IllegalAccessException never) {
                throw new AssertionError(never);
            }
        }
        return fields;
    }

    private static Object plain(Object value) {
        if (value instanceof List<?> some) {
            return some.stream().map(Vectors::plain).toList();
        }
        boolean isPlain = value == null || value instanceof Number || value instanceof Boolean;
        return isPlain ? value : value.toString();
    }

    /** All that is expected is there, in full; what is missing counts as 0, false or empty. */
    private static boolean isLikeAll(JsonObject is, JsonObject expected) {
        return expected.keySet().stream()
                .allMatch(key -> isLike(is.has(key) ? is.get(key) : NOTHING, expected.get(key)));
    }

    private static boolean isLike(JsonElement is, JsonElement expected) {
        List<JsonElement> some = is.isJsonArray() ? is.getAsJsonArray().asList() : List.of();
        if (expected.isJsonObject()) {
            return some.size() == number(expected.getAsJsonObject(), "length", -1);
        }
        if (expected.isJsonArray()) {
            return some.equals(all(expected.getAsJsonArray()));
        }
        return is.equals(expected) || is.isJsonNull() && expected.getAsString().matches("0|false|");
    }

    /** With the shorthands written out. */
    private static List<JsonElement> all(JsonArray some) {
        List<JsonElement> all = new ArrayList<>();
        for (JsonElement one : some) {
            JsonObject of = one.isJsonObject() ? one.getAsJsonObject() : new JsonObject();
            for (int i = 0; i < number(of, "count", 1); i++) {
                String name = text(of, "prefix") + i;
                JsonElement written = of.has("each") ? of.get("each") : new JsonPrimitive(name);
                all.add(of.has("count") ? written : one);
            }
        }
        return all;
    }

    private static void each(JsonObject step, String what, Function<String, JsonElement> of) {
        if (!step.has(what)) {
            return;
        }
        for (Map.Entry<String, JsonElement> one : step.getAsJsonObject(what).entrySet()) {
            JsonElement is = of.apply(one.getKey());
            String where = "at " + step.get("at") + " " + what + " of " + one.getKey();
            check(is.equals(one.getValue()), () -> where + " is " + is + ", not " + one.getValue());
        }
    }

    private static void check(boolean holds, Supplier<String> otherwise) {
        if (!holds) {
            throw new AssertionError(otherwise.get());
        }
    }

    private static long number(JsonObject of, String key, long otherwise) {
        return of.has(key) ? of.get(key).getAsLong() : otherwise;
    }

    private static long span(JsonElement value) {
        return value.isJsonNull() ? -1 : value.getAsLong();
    }

    private static String text(JsonObject of, String key) {
        return of.has(key) ? of.get(key).getAsString() : null;
    }

    private static boolean is(JsonObject of, String key) {
        return of.has(key) && of.get(key).getAsBoolean();
    }

    private static List<String> strings(JsonObject of, String key) {
        return all(of.getAsJsonArray(key)).stream().map(JsonElement::getAsString).toList();
    }
}
