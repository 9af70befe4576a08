package pgfence;

import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Reads the JSON of an error's DETAIL; the JDK brings nothing for that. */
final class Json {
    private final String text;
    private int at;

    private Json(String text) {
        this.text = text;
    }

    /** The object, or an empty one where there is none. */
    @SuppressWarnings("unchecked")
    static Map<String, Object> object(String text) {
        try {
            return text == null ? Map.of() : (Map<String, Object>) new Json(text.strip()).value();
        } catch (RuntimeException noObject) {
            return Map.of();
        }
    }

    private Object value() {
        return switch (peek()) {
            case '{' -> members();
            case '[' -> elements();
            case '"' -> string();
            default -> word();
        };
    }

    private Map<String, Object> members() {
        Map<String, Object> members = new LinkedHashMap<>();
        at++;
        while (peek() != '}') {
            String key = string();
            skip(':');
            members.put(key, value());
            skip(',');
        }
        at++;
        return Collections.unmodifiableMap(members);
    }

    private List<Object> elements() {
        List<Object> elements = new ArrayList<>();
        at++;
        while (peek() != ']') {
            elements.add(value());
            skip(',');
        }
        at++;
        return Collections.unmodifiableList(elements);
    }

    private String string() {
        StringBuilder string = new StringBuilder();
        for (at++; text.charAt(at) != '"'; at++) {
            char one = text.charAt(at);
            string.append(one == '\\' ? escaped() : one);
        }
        at++;
        return string.toString();
    }

    private char escaped() {
        at++;
        return switch (text.charAt(at)) {
            case 'n' -> '\n';
            case 't' -> '\t';
            case 'r' -> '\r';
            case 'b' -> '\b';
            case 'f' -> '\f';
            case 'u' -> (char) Integer.parseInt(text.substring(at + 1, (at += 4) + 1), 16);
            default -> text.charAt(at);
        };
    }

    private Object word() {
        int start = at;
        while (at < text.length() && ",]} \t\r\n".indexOf(text.charAt(at)) < 0) {
            at++;
        }
        String word = text.substring(start, at);
        return switch (word) {
            case "null" -> null;
            case "true", "false" -> Boolean.valueOf(word);
            default -> word.matches("-?\\d+") ? (Object) Long.valueOf(word) : Double.valueOf(word);
        };
    }

    /** The next character that is no space. */
    private char peek() {
        while (Character.isWhitespace(text.charAt(at))) {
            at++;
        }
        return text.charAt(at);
    }

    private void skip(char one) {
        if (peek() == one) {
            at++;
        }
        peek();
    }
}
