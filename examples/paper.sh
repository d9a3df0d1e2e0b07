# A comparison for a paper: 4 algorithms x 3 partitions x 3 learning rates x 3 seeds, chosen on validation data.
FOLDER=${1:-runs/paper} ROUNDS=${2:-100}
fedsim run --algorithm fedavg,fedprox,scaffold,fedadam --dataset "digits(partition='iid')" --dataset "digits(partition='dirichlet', alpha=0.1)" --dataset "digits(partition='shards')" \
    --validation 0.2 --client-learning-rate 0.03,0.1,0.3 --seeds 3 --rounds "$ROUNDS" --folder "$FOLDER" --no-progress
fedsim compare "$FOLDER" --target accuracy=0.8 --latex "$FOLDER/table.tex" --csv "$FOLDER/settings.csv" --figure "$FOLDER/curves.pdf"
fedsim report "$FOLDER" --out "$FOLDER/report.html"
