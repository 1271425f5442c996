use dlock::{Result, distributed_lock};

#[distributed_lock(key = "order:{order_id}")]
async fn pay(order_id: u64) -> Result<u64> {
    let shared = std::rc::Rc::new(order_id);
    std::future::ready(()).await;
    Ok(*shared)
}

fn main() {
    fn sent(_: impl Send) {}
    sent(pay(7));
}
