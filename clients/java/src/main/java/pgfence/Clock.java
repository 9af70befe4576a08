package pgfence;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;

/** A clock that nobody can set, and that goes on while the machine sleeps where the system tells. */
final class Clock {
    /** Waits do not count the time that the machine slept; so they look at the clock again after so long. */
    static final long LOOK_AGAIN = 1_000_000_000;

    /** So that a time and a span, or two, can be added. */
    private static final Duration LONGEST = Duration.ofDays(366 * 70);

    private static final Path UPTIME = Path.of("/proc/uptime");
    private static final long START = System.nanoTime();
    private static final long START_UPTIME = uptime();
    /** It is told in hundredths of a second, and may not run ahead. */
    private static final long COARSE = 20_000_000;

    private Clock() {}

    /** Nanoseconds. */
    static long now() {
        // The clock of nanoTime stands still while the machine sleeps, and Java has no other that is monotonic. Linux
        // tells since when it is up, which goes on.
        return Math.max(System.nanoTime() - START, uptime() - START_UPTIME - COARSE);
    }

    /** A span of so many nanoseconds; a longer one than they count (a session lease's may be 1000 years) is cut short. */
    static long nanos(Duration span) {
        return span.compareTo(LONGEST) > 0 ? LONGEST.toNanos() : span.toNanos();
    }

    private static long uptime() {
        try {
            String text = Files.readString(UPTIME);
            return (long) (Double.parseDouble(text.substring(0, text.indexOf(' '))) * 1e9);
        } catch (IOException | RuntimeException elsewhere) {
            return Long.MIN_VALUE / 4;
        }
    }
}
