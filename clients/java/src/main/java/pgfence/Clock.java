package pgfence;

import java.io.FileInputStream;
import java.io.IOException;

/** A monotonic clock. On Linux it goes on while the computer sleeps. */
final class Clock {
    private static final double OFFSET = System.nanoTime() / 1e9 - uptime();

    /** The uptime is in hundredths of a second. Rounded, it must not be ahead of nanoTime. */
    private static final double MAX_ROUNDING = 0.02;

    /**
     * How long an uptime is used, as reading it costs 10 µs. A sleep within this time is noticed
     * after it: no later than one that begins right after a call of {@link #now}.
     */
    private static final double UPTIME_AGE = 0.001;

    private static double readAt = Double.NEGATIVE_INFINITY, lastUptime;

    private Clock() {}

    /** Returns the time in whole milliseconds. */
    static synchronized long now() {
        // nanoTime is Java's only monotonic clock, and stands still while the computer sleeps.
        double awake = System.nanoTime() / 1e9;
        if (awake >= readAt + UPTIME_AGE) {
            readAt = awake;
            lastUptime = uptime();
        }
        return (long) (Math.max(awake, lastUptime + OFFSET - MAX_ROUNDING) * 1000);
    }

    private static double uptime() {
        try (FileInputStream file = new FileInputStream("/proc/uptime")) {
            return Double.parseDouble(new String(file.readNBytes(100)).split(" ")[0]);
        } catch (IOException | RuntimeException elsewhere) {
            return 0;
        }
    }
}
