package pgfence;

import java.io.FileInputStream;
import java.io.IOException;

/** A monotonic clock. On Linux it goes on while the computer sleeps. */
final class Clock {
    private static final double OFFSET = System.nanoTime() / 1e9 - uptime();

    /** The uptime is in hundredths of a second. Rounded, it must not be ahead of nanoTime. */
    private static final double MAX_ROUNDING = 0.02;

    private Clock() {}

    /** Returns the time in whole milliseconds. */
    static long now() {
        // nanoTime is Java's only monotonic clock, and stands still while the computer sleeps.
        double awake = System.nanoTime() / 1e9;
        return (long) (Math.max(awake, uptime() + OFFSET - MAX_ROUNDING) * 1000);
    }

    private static double uptime() {
        try (FileInputStream file = new FileInputStream("/proc/uptime")) {
            return Double.parseDouble(new String(file.readNBytes(100)).split(" ")[0]);
        } catch (IOException | RuntimeException elsewhere) {
            return 0;
        }
    }
}
