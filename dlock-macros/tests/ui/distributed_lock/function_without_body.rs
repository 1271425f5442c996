use dlock::{Result, distributed_lock};

trait Pay {
    #[distributed_lock(key = "order:{order_id}")]
    async fn pay(&self, order_id: u64) -> Result<()>;
}

fn main() {}
