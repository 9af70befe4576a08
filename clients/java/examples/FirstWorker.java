import java.sql.DriverManager;
import java.time.Duration;
import pgfence.Fence;
import pgfence.FenceException.*;

class FirstWorker {
    public static void main(String[] args) throws Exception {
        var fence = new Fence(args[0]);
        try (var lease = fence.lease("order:7").ttl(Duration.ofSeconds(30)).acquire();
                var connection = DriverManager.getConnection("jdbc:" + args[0])) {
            // Whatever takes long goes here: a heartbeat keeps the lease meanwhile.
            var pay = connection.prepareStatement("UPDATE orders SET status = 'paid' WHERE id = 7");
            lease.guard(connection).run(c -> pay.executeUpdate());
        } catch (LeaseTaken taken) {
            System.out.println("somebody else is at it");
        } catch (LeaseLost loss) {
            System.out.println("stop, and report no failure: " + loss);
        }
    }
}
