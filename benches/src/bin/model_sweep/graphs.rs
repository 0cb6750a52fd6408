// A network of graphs, included behind `models.rs`.

use burn::tensor::IndexingUpdateOp;

/// A graph convolutional network (Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks",
/// 2017), whose sums are not scaled by how many neighbors a node has.
#[derive(Module, Debug)]
pub(crate) struct GraphNet {
    layers: Vec<Linear>,
    head: Linear,
}

impl GraphNet {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, .. } = *shape;
        Self {
            layers: (0..layers).map(|_| LinearConfig::new(width, width).init(device)).collect(),
            head: LinearConfig::new(width, classes).init(device),
        }
    }

    /// Of features of all nodes, where edges begin and end, and the nodes' classes.
    pub(crate) fn loss(
        &self,
        (nodes, sources, ends, targets): (
            Tensor<2>,
            Tensor<1, Int>,
            Tensor<1, Int>,
            Tensor<1, Int>,
        ),
    ) -> Tensor<1> {
        let x = self.layers.iter().fold(nodes, |x, layer| {
            let x = layer.forward(x);
            let sent = x.clone().select(0, sources.clone());
            // To what a node has itself.
            let x = x.select_assign(0, ends.clone(), sent, IndexingUpdateOp::Add);
            activation::relu(x)
        });
        cross_entropy(self.head.forward(x), targets)
    }
}
